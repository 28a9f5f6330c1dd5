"""How many steps a round has: as many as asked for, or fewer as the loss falls."""

import math
from typing import Any

from hvdtrain.averaging.options import LocalTraining

_ROUNDS = 10


class Period:
    """The number of steps between two averages (H).

    ``adacomm``: after every 10 rounds, H is the first H times the root of how far the mean loss of these rounds has
    fallen since the first ones, rounded up, and never grows (Wang and Joshi, arXiv:1810.08313, eq. 17, with rounds
    for their minutes).
    """

    def __init__(self, options: LocalTraining):
        self._first = self.steps = options.every
        self._adapts = options.schedule == "adacomm"
        self._first_loss: float | None = None
        self._losses = 0.0
        self._num_steps = self._num_rounds = 0

    def round_ended(self, loss: float, steps: int) -> None:
        """Takes a round's losses, added up over ranks and steps, and how many steps these were."""
        if not self._adapts:
            return
        self._losses += loss
        self._num_steps += steps
        self._num_rounds += 1
        if self._num_rounds < _ROUNDS or not self._num_steps:
            return
        mean = self._losses / self._num_steps
        self._losses, self._num_steps, self._num_rounds = 0.0, 0, 0
        if self._first_loss is None:
            self._first_loss = mean
        elif 0 <= mean < self._first_loss:
            self.steps = min(self.steps, max(1, math.ceil(self._first * math.sqrt(mean / self._first_loss))))

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {
            "steps": self.steps,
            "first_loss": self._first_loss,
            "losses": self._losses,
            "num_steps": self._num_steps,
            "num_rounds": self._num_rounds,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Takes over what :meth:`state` gave."""
        self.steps, self._first_loss = state["steps"], state["first_loss"]
        self._losses, self._num_steps, self._num_rounds = state["losses"], state["num_steps"], state["num_rounds"]
