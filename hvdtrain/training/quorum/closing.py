"""When an update closes, and whose micro-batches are part of it. Pure decisions, taken on rank 0."""

import dataclasses
from collections.abc import Mapping, Sequence


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
    """Seconds after which one rank suffices."""

    @classmethod
    def exactly(cls, ranks: Sequence[int]) -> "ClosingRule":
        """Closes when these ranks are ready, and leaves out all others."""
        return cls(active=tuple(ranks), quorum=len(ranks), required=tuple(ranks))

    def contributors(self, ready: Mapping[int, float]) -> tuple[int, ...]:
        """The ranks that contribute if the update closes now."""
        return tuple(sorted(set(ready) & set(self.active)))

    def closes_s(self, began: Mapping[int, float], ready: Mapping[int, float]) -> float | None:
        """When the update closes if no further rank gets ready; None: never.

        Args:
            began: when ranks began to compute their micro-batches for it, in seconds of any clock.
            ready: when ranks have made them; each of them began.
        """
        found = self.contributors(ready)
        if not found or not set(self.required) <= set(found):
            return None
        begin_s, last_s = min(began.values()), max(ready[rank] for rank in found)
        times_s = []
        if self.deadline_s is not None:
            times_s.append(max(begin_s + self.deadline_s, min(ready[rank] for rank in found)))
        if len(found) >= self.quorum:
            quorum_s = sorted(ready[rank] for rank in found)[self.quorum - 1]
            computing = set(began) & set(self.active) - set(found)
            times_s.append(quorum_s + self.grace * (quorum_s - begin_s) if computing else last_s)
        return min(times_s, default=None)


class OpenUpdate:
    """The update that is open, on rank 0: who computes, and who is ready.

    Args:
        number: its number.
    """

    def __init__(self, number: int = 0):
        self.number = number
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._began: dict[int, float] = {}
        self._ready: dict[int, float] = {}
        self._rule: ClosingRule | None = None

    def begin(self, rank: int, number: int, rule: ClosingRule, now_s: float) -> None:
        """A rank begins to compute a micro-batch; ignored if it is for an update that has closed.

        Args:
            rule: of this update; all ranks compute the same.
        """
        if number == self.number:
            self._began[rank] = now_s
            self._rule = rule

    def ready(self, rank: int, number: int, now_s: float) -> None:
        """A rank has made its micro-batch; ignored if it is for an update that has closed."""
        if number == self.number:
            self._ready[rank] = now_s

    def close(self, now_s: float) -> tuple[int, ...] | None:
        """Closes the update if that is due, and opens the next; returns the contributors, or None."""
        closes_s = self._closes_s()
        if closes_s is None or closes_s > now_s:
            return None
        assert self._rule is not None
        contributors = self._rule.contributors(self._ready)
        self.number += 1
        self._start_afresh()
        return contributors

    def seconds_left(self, now_s: float) -> float | None:
        """Until the update closes if no further rank gets ready; None: it does not."""
        closes_s = self._closes_s()
        return None if closes_s is None else max(0.0, closes_s - now_s)

    def _closes_s(self) -> float | None:
        return None if self._rule is None else self._rule.closes_s(self._began, self._ready)
