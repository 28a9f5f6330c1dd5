"""How far a run has come: what the loop remembers from step to step, and a checkpoint keeps."""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass
class Progress:
    """Where a run stands. The same on every rank."""

    step: int = 0
    """Steps made."""
    reduced_steps: int = 0
    """Those of which gradients were averaged."""
    previous_step: int = 0
    """Those before the last call."""
    epoch: int = 0
    """The epoch that has begun last."""
    is_in_epoch: bool = False
    """False before the first step of an epoch."""
    is_between_calls: bool = True
    """False while what follows a call (log, comparison, evaluation, end of an epoch) is still to be done."""
    is_stopped: bool = False
    """Whether a callback has stopped the training."""
    values: dict[str, float] = dataclasses.field(default_factory=dict)
    """Loss and metrics of the epoch so far, over all ranks."""
    values_step: int = 0
    """The step that ``values`` are of."""
    evaluated: dict[str, float] = dataclasses.field(default_factory=dict)
    """The last evaluation."""
    validated: dict[str, float] = dataclasses.field(default_factory=dict)
    """The last evaluation of this epoch, under the names that Keras' callbacks know."""
    skipped_steps_told: int = 0
    """How many skipped steps the user has heard of."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return dataclasses.asdict(self)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes over what :meth:`state` gave."""
        for field in dataclasses.fields(self):
            setattr(self, field.name, state[field.name])

    def evaluation_done(self, results: dict[str, float]) -> None:
        """Keeps the results of an evaluation."""
        self.evaluated = results
        self.validated = {f"val_{name}": value for name, value in results.items()}
