"""When an update closes, and whose micro-batches are part of it. Pure decisions, taken on rank 0."""

import dataclasses
from collections.abc import Collection, Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClosingRule:
    """When an update closes."""

    active: Sequence[int]
    """The ranks that may contribute."""
    quorum: int
    """How many of them suffice."""
    required: Sequence[int] = ()
    """Ranks to wait for in any case."""
    deadline_s: float | None = None
    """Seconds after which one rank suffices."""

    @classmethod
    def exactly(cls, ranks: Sequence[int]) -> "ClosingRule":
        """Closes when these ranks are ready, and leaves out all others."""
        return cls(active=tuple(ranks), quorum=len(ranks), required=tuple(ranks))

    def contributors(self, ready: Collection[int], elapsed_s: float) -> tuple[int, ...] | None:
        """The ranks that contribute if the update closes now; None if it does not.

        Args:
            ready: the ranks that have made their micro-batches.
            elapsed_s: since the first of them began.
        """
        found = tuple(sorted(set(ready) & set(self.active)))
        if not found or not set(self.required) <= set(found):
            return None
        is_late = self.deadline_s is not None and elapsed_s >= self.deadline_s
        return found if is_late or len(found) >= self.quorum else None


class OpenUpdate:
    """The update that is open, on rank 0: who is ready for it.

    Args:
        number: its number.
    """

    def __init__(self, number: int = 0):
        self.number = number
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._ready: set[int] = set()
        self._rule: ClosingRule | None = None
        self._began_s = 0.0

    def ready(self, rank: int, number: int, rule: ClosingRule, *, began_s: float) -> None:
        """A rank has made its micro-batch; ignored if it is for an update that has closed.

        Args:
            rule: of this update; all ranks compute the same.
            began_s: when the rank began to compute.
        """
        if number != self.number:
            return
        self._began_s = min(self._began_s, began_s) if self._ready else began_s
        self._ready.add(rank)
        self._rule = rule

    def close(self, now_s: float) -> tuple[int, ...] | None:
        """Closes the update if that is due, and opens the next; returns the contributors, or None."""
        if self._rule is None:
            return None
        contributors = self._rule.contributors(self._ready, now_s - self._began_s)
        if contributors is not None:
            self.number += 1
            self._start_afresh()
        return contributors

    def seconds_left(self, now_s: float) -> float | None:
        """Until the deadline can close the update; None if only another rank can."""
        if self._rule is None or self._rule.deadline_s is None:
            return None
        left_s = self._began_s + self._rule.deadline_s - now_s
        return left_s if left_s > 0 else None
