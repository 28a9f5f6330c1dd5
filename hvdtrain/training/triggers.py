"""At which steps of a run something is due."""

from collections.abc import Sequence


class Triggers:
    """What is due every N steps.

    Args:
        total_steps: of the run.
        marks: steps after which a compiled call has to end.
        intervals: further intervals at which a compiled call has to end.
        loose: what is due at the end of the first call after its interval, instead of ending a call there.
        every: the interval of each thing in steps; 0: never.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        marks: Sequence[int] = (),
        intervals: Sequence[int] = (),
        loose: Sequence[str] = (),
        **every: int,
    ):
        self._total_steps = total_steps
        self._marks = [total_steps, *marks]
        self._every = every
        self._exact = [every[name] for name in every if every[name] and name not in loose]
        self._exact += [interval for interval in intervals if interval]
        self._loose = [every[name] for name in loose if every[name]]

    def is_due(self, name: str, before: int, step: int, *, at_end: bool = True) -> bool:
        """Whether something is due at one of the steps after ``before``, up to ``step``.

        Args:
            at_end: whether it is also due at the end of the run.
        """
        every = self._every[name]
        return every > 0 and (step // every > before // every or (at_end and step == self._total_steps))

    def next_call_end(self, step: int) -> int:
        """The next step after which a compiled call has to end."""
        return min([*(mark for mark in self._marks if mark > step), *_next_multiples(self._exact, step)])

    def next_due(self, step: int) -> int:
        """The next step at which anything is due."""
        return min([self.next_call_end(step), *_next_multiples(self._loose, step)])


def _next_multiples(intervals: Sequence[int], step: int) -> list[int]:
    return [(step // every + 1) * every for every in intervals]
