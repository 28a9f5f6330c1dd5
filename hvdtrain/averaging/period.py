"""How many steps a round has: as many as asked for, or fewer as the loss falls."""

import math
from typing import Any

from hvdtrain.averaging.options import LocalTraining

# Of all ranks together: enough for a mean loss that tells how far a run has come, and one round with H=64 on two ranks.
_STEPS = 128


class Period:
    """The number of steps between two averages (H).

    ``adacomm``: at the end of each round by which ranks have made 128 steps more, H is the first H times the root of
    how far the mean loss of these has fallen since the first ones, rounded up, and never grows (Wang and Joshi,
    arXiv:1810.08313, eq. 17, with steps for their minutes).
    """

    def __init__(self, options: LocalTraining):
        self._first = self.steps = options.every
        self._adapts = options.schedule == "adacomm"
        self._first_loss: float | None = None
        self._losses = 0.0
        self._num_steps = 0

    def round_ended(self, loss: float, steps: int) -> None:
        """Takes a round's losses, added up over ranks and steps, and how many steps these were."""
        if not self._adapts:
            return
        self._losses += loss
        self._num_steps += steps
        if self._num_steps < _STEPS:
            return
        mean = self._losses / self._num_steps
        self._losses, self._num_steps = 0.0, 0
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
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Takes over what :meth:`state` gave."""
        self.steps, self._first_loss = state["steps"], state["first_loss"]
        self._losses, self._num_steps = state["losses"], state["num_steps"]
