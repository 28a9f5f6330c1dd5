"""Compares what a step of all ranks has done with what the step of one process does."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from hvdtrain.distributed.gradient_reduction import Gradient
from hvdtrain.training.equality.norms import norm
from hvdtrain.training.equality.updates import Update, distance, norm_of, norm_of_entries
from hvdtrain.training.equality.ways import Outcome

Kind = Literal["updates", "gradient", "variable", "value", "returned"]


@dataclasses.dataclass(frozen=True)
class Deviation:
    """A difference between two ways to make a step."""

    kind: Kind
    name: str
    """What differs: the path of a variable, or the name of a metric."""
    size: float
    """The norm of the difference."""
    scale: float
    """The norm of what one process has; of a variable, that of its change."""
    rounding: float
    """The difference that rounding explains, without what the program makes of it."""

    @property
    def relative(self) -> float:
        """The difference relative to what one process has."""
        return self.size / self.scale if self.scale else np.inf


class Comparison:
    """Compares steps with that of one process, and has each apply the gradients of that one.

    So one difference does not cause others: what an optimizer makes of equal gradients must be equal.

    Args:
        whole: what one process does.
        epsilon: the rounding of one operation.
    """

    def __init__(self, whole: Outcome, epsilon: float):
        self._whole = whole
        self._epsilon = epsilon
        self._part = epsilon ** (2 / 3)
        self._num_updates = 0
        self._of_gradients: list[Deviation] = []

    def begin(self) -> None:
        """Before a step."""
        self._num_updates, self._of_gradients = 0, []

    def apply(self, leaf: Any, update: Update) -> Sequence[Gradient]:
        """Compares what an optimizer applies; returns what it applies in the step of one process."""
        number, self._num_updates = self._num_updates, self._num_updates + 1
        if number >= len(self._whole.updates):
            return update.gradients
        expected = self._whole.updates[number]
        if [v.path for v in update.variables] != [v.path for v in expected.variables]:
            self._of_gradients.append(Deviation("updates", "the variables of an update", np.inf, 1.0, 0.0))
            return update.gradients
        total = expected.norm()
        for variable, own, other in zip(update.variables, update.gradients, expected.gradients, strict=True):
            scale = norm_of(other)
            rounding = self._part * scale + 8 * self._epsilon * total
            # Rows that one process has added up, and ranks have not, are other gradients for an adaptive optimizer.
            size = max(distance(own, other), abs(norm_of_entries(own) - norm_of_entries(other)))
            self._of_gradients.append(Deviation("gradient", f"{number} {variable.path}", size, scale, rounding))
        return expected.gradients

    def deviations(self, outcome: Outcome) -> list[Deviation]:
        """After a step: what was compared, in the order in which a step computes it."""
        if self._num_updates != len(self._whole.updates):
            return [Deviation("updates", "the number of updates", np.inf, 1.0, 0.0)]
        values = self._of_values("value", outcome.values, self._whole.values)
        returned = self._of_values("returned", outcome.returned, self._whole.returned)
        return [*self._of_gradients, *self._of_variables(outcome), *values, *returned]

    def _of_variables(self, outcome: Outcome) -> Iterator[Deviation]:
        changes, expected = outcome.changes, self._whole.changes
        for name in {**expected, **changes}:
            own, other = changes.get(name), expected.get(name)
            if own is None or other is None:
                present = own or other
                assert present is not None
                size = norm(present.after, minus=present.before)
                yield Deviation("variable", name, size, size, 0.0)
                continue
            scale = norm(other.after, minus=other.before)
            rounding = self._part * scale + 4 * self._epsilon * norm(other.after)
            yield Deviation("variable", name, norm(own.after, minus=other.after), scale, rounding)

    def _of_values(
        self, kind: Kind, values: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]
    ) -> Iterator[Deviation]:
        for name, value in expected.items():
            if name not in values or value.dtype == object:
                continue
            scale = float(np.linalg.norm(value))
            rounding = self._part * scale + 8 * self._epsilon
            yield Deviation(kind, name, float(np.linalg.norm(values[name] - value)), scale, rounding)
