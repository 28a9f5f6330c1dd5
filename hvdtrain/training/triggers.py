"""At which steps of a run something is due."""

from collections.abc import Sequence
from typing import NamedTuple


class Interval(NamedTuple):
    """A fixed interval in steps, offset by ``phase``."""

    steps: int
    phase: int = 0

    def times_due(self, step: int) -> int:
        """Number of firings up to a step, up to a constant offset."""
        return (step - self.phase) // self.steps

    def next_due(self, step: int) -> int:
        """The first step after this one at which something is due."""
        return (self.times_due(step) + 1) * self.steps + self.phase


class Triggers:
    """What is due every N steps.

    Args:
        total_steps: the number of steps of the run.
        marks: steps after which a compiled call has to end.
        intervals: further intervals at which a compiled call has to end.
        loose: things that are due at the end of the first call after their interval, instead of ending a call there.
        every: the interval of each thing, or its number of steps; 0: never.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        marks: Sequence[int] = (),
        intervals: Sequence[int] = (),
        loose: Sequence[str] = (),
        **every: int | Interval,
    ):
        self._total_steps = total_steps
        self._marks = [total_steps, *marks]
        self._every = {name: _interval(each) for name, each in every.items() if each}
        self._exact = [each for name, each in self._every.items() if name not in loose]
        self._exact += [Interval(steps) for steps in intervals if steps]
        self._loose = [each for name, each in self._every.items() if name in loose]

    def is_due(self, name: str, before: int, step: int, *, at_end: bool = True) -> bool:
        """Whether something is due at one of the steps after ``before``, up to ``step``.

        Args:
            at_end: whether it is also due at the end of the run.
        """
        if name not in self._every:
            return False
        every = self._every[name]
        return every.times_due(step) > every.times_due(before) or (at_end and step == self._total_steps)

    def next_call_end(self, step: int) -> int:
        """The next step after which a compiled call has to end."""
        return min([*(mark for mark in self._marks if mark > step), *(each.next_due(step) for each in self._exact)])

    def next_due(self, step: int) -> int:
        """The next step at which anything is due."""
        return min([self.next_call_end(step), *(each.next_due(step) for each in self._loose)])


def _interval(every: int | Interval) -> Interval:
    return every if isinstance(every, Interval) else Interval(every)
