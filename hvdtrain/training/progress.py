"""The progress of a run: the state that the loop carries from step to step and a checkpoint keeps."""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass
class Progress:
    """The progress of a run. The same on every rank."""

    step: int = 0
    """Steps made."""
    reduced_steps: int = 0
    """Steps whose gradients were averaged over ranks."""
    previous_step: int = 0
    """Steps made before the last call."""
    epoch: int = 0
    """The epoch that began last."""
    is_in_epoch: bool = False
    """False before the first step of an epoch."""
    is_between_calls: bool = True
    """False while what follows a call (log, comparison, evaluation, end of an epoch) remains to be done."""
    is_logged: bool = True
    """Whether those of them that come before the evaluation are done: a resumed run must not log them twice."""
    is_stopped: bool = False
    """Whether a callback has stopped the training."""
    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Loss and metrics of the epoch so far, over all ranks."""
    values_step: int = 0
    """The step that ``values`` were computed at."""
    evaluated: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The results of the last evaluation."""
    validated: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The last evaluation of this epoch, under the names that Keras' callbacks expect."""
    reported_skipped_steps: int = 0
    """Number of skipped steps that have been reported."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return dataclasses.asdict(self)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`state` returned."""
        for field in dataclasses.fields(self):
            setattr(self, field.name, state[field.name])

    def record_evaluation(self, results: dict[str, Any]) -> None:
        """Keeps the results of an evaluation."""
        self.evaluated = results
        self.validated = {f"val_{name}": value for name, value in results.items()}
