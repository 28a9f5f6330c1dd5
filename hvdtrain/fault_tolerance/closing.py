"""When an update closes, or a round of local SGD, and whose part it takes. Pure decisions, taken on rank 0."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClosingRule:
    """When an update closes."""

    active: Sequence[int]
    """The ranks that may contribute."""
    quorum: int
    """How many of them suffice."""
    required: Sequence[int] = ()
    """Ranks to wait for in any case."""
    grace: float = 0.0
    """Once a quorum is ready, how long to wait for ranks that still compute, relative to how long it has taken."""
    deadline_s: float | None = None
    """Seconds after the first of the ready ranks has begun, after which one rank suffices."""

    @classmethod
    def exactly(cls, ranks: Sequence[int]) -> "ClosingRule":
        """Closes when these ranks are ready, and leaves out all others."""
        return cls(active=tuple(ranks), quorum=len(ranks), required=tuple(ranks))

    def contributors(self, ready: Collection[int]) -> tuple[int, ...]:
        """The ranks that contribute if the update closes now."""
        return tuple(sorted(set(ready) & set(self.active)))

    def closes_s(self, computing: Collection[int], ready: Mapping[int, "Ready"]) -> float | None:
        """When the update closes if no further rank gets ready, in seconds of any clock; None: never.

        Args:
            computing: the ranks that have begun their micro-batches for it.
            ready: those of them that have made them.
        """
        found = self.contributors(ready)
        if not found or not set(self.required) <= set(found):
            return None
        moments_s = sorted(ready[rank].moment_s for rank in found)
        begin_s = min(ready[rank].began_s for rank in found)
        times_s = []
        if self.deadline_s is not None:
            times_s.append(max(begin_s + self.deadline_s, moments_s[0]))
        if len(found) >= self.quorum:
            quorum_s = moments_s[self.quorum - 1]
            others_compute = set(computing) & set(self.active) - set(found)
            times_s.append(quorum_s + self.grace * (quorum_s - begin_s) if others_compute else moments_s[-1])
        return min(times_s, default=None)


@dataclasses.dataclass(frozen=True)
class Ready:
    """When a rank began to compute its micro-batch for an update, and when it had made it, in seconds of any clock."""

    began_s: float
    moment_s: float


class OpenUpdate:
    """The update that is open, on rank 0: who computes, and who is ready.

    Args:
        ranks: that compute micro-batches for it.
        number: its number.
    """

    def __init__(self, ranks: Collection[int], number: int = 0):
        self.number = number
        self._start(ranks)

    def _start(self, ranks: Collection[int]) -> None:
        self._computing = set(ranks)
        self._ready: dict[int, Ready] = {}
        self._rule: ClosingRule | None = None

    def begin(self, rank: int, number: int) -> None:
        """A rank that missed the last update begins to compute; ignored if it is for an update that has closed."""
        if number == self.number:
            self._computing.add(rank)

    def ready(self, rank: int, number: int, rule: ClosingRule, seconds: float, now_s: float) -> None:
        """A rank has made its micro-batch; ignored if it is for an update that has closed.

        Args:
            rule: of this update; all ranks compute the same.
            seconds: how long it has taken.
        """
        if number == self.number:
            self._ready[rank] = Ready(now_s - seconds, now_s)
            self._rule = rule

    def close(self, now_s: float) -> tuple[int, ...] | None:
        """Closes the update if that is due, and opens the next; returns the contributors, or None.

        They compute for the next one at once.
        """
        closes_s = self._closes_s()
        if closes_s is None or closes_s > now_s:
            return None
        assert self._rule is not None
        contributors = self._rule.contributors(self._ready)
        self.number += 1
        self._start(contributors)
        return contributors

    def seconds_left(self, now_s: float) -> float | None:
        """Until the update closes if no further rank gets ready; None: it does not."""
        closes_s = self._closes_s()
        return None if closes_s is None else max(0.0, closes_s - now_s)

    def _closes_s(self) -> float | None:
        return None if self._rule is None else self._rule.closes_s(self._computing, self._ready)
