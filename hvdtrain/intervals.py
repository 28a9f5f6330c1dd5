"""At which steps of a run something is to happen."""

from collections.abc import Sequence


class Intervals:
    """What happens every so many steps.

    Args:
        total_steps: of the run.
        marks: steps at which something happens once.
        others: intervals of which only the next step is asked for.
        every: the interval of each thing, in steps; 0: it never happens.
    """

    def __init__(self, total_steps: int, *, marks: Sequence[int] = (), others: Sequence[int] = (), **every: int):
        self._total_steps = total_steps
        self._marks = [total_steps, *marks]
        self._every = every
        self._intervals = [interval for interval in (*every.values(), *others) if interval]

    def is_due(self, thing: str, before: int, step: int, *, at_end: bool = True) -> bool:
        """Whether it happens at one of the steps after ``before``, up to ``step``.

        Args:
            at_end: whether it also happens at the end of the run.
        """
        every = self._every[thing]
        return every > 0 and (step // every > before // every or (at_end and step == self._total_steps))

    def steps_to_next(self, step: int) -> int:
        """How many steps can be made before anything happens."""
        to_marks = [mark - step for mark in self._marks if mark > step]
        return min([*to_marks, *(every - step % every for every in self._intervals)])
