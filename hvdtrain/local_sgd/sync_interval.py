"""The sync interval: the number of steps per round, constant or decreasing with the loss."""

import math
from typing import Any

from hvdtrain.local_sgd.config import LocalSGDConfig

# Steps of all ranks: enough for a meaningful mean loss, and one round with H=64 on two ranks.
_STEPS_PER_UPDATE = 128


class SyncInterval:
    """The number of steps between two averages (H).

    With ``adacomm``, H is updated at the end of a round after every 128 steps of all ranks: to the initial H times the
    square root of the ratio of their mean loss to that of the first 128, rounded up. It never grows (Wang and Joshi,
    arXiv:1810.08313, eq. 17, with steps instead of minutes).
    """

    def __init__(self, config: LocalSGDConfig):
        self._first = self.steps = config.sync_every
        self._adapts = config.sync_schedule == "adacomm"
        self._first_loss: float | None = None
        self._losses = 0.0
        self._num_steps = 0

    def round_ended(self, loss: float, steps: int) -> None:
        """Records a round: its losses, summed over ranks and steps, and the number of these steps."""
        if not self._adapts:
            return
        self._losses += loss
        self._num_steps += steps
        if self._num_steps < _STEPS_PER_UPDATE:
            return
        mean = self._losses / self._num_steps
        self._losses, self._num_steps = 0.0, 0
        if self._first_loss is None:
            self._first_loss = mean
        elif 0 <= mean < self._first_loss:
            self.steps = min(self.steps, max(1, math.ceil(self._first * math.sqrt(mean / self._first_loss))))

    def state(self) -> dict[str, Any]:
        """The state to save in a checkpoint."""
        return {
            "steps": self.steps,
            "first_loss": self._first_loss,
            "losses": self._losses,
            "num_steps": self._num_steps,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state` returned."""
        self.steps, self._first_loss = state["steps"], state["first_loss"]
        self._losses, self._num_steps = state["losses"], state["num_steps"]
