"""Which members of an elastic job have been silent, or have kept the others waiting, for too long."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hvdtrain.fault_tolerance.elastic.peer import Peer

_HELLO_S = 5.0


class Overdue(NamedTuple):
    """A process that is removed from the job."""

    peer: Peer
    why: str


class NoProgress(NamedTuple):
    """No member makes progress, and none can be blamed."""

    timeout_s: float


class MemberTimeouts:
    """The deadlines of the processes that are connected to the coordinator.

    Args:
        now: the current time of a monotonic clock, as in all methods.
    """

    def __init__(self, now: float):
        self._progress_at = now

    def note_progress(self, now: float) -> None:
        """Notes that a member has made progress, or could not make any until now."""
        self._progress_at = now

    def silent(self, peers: Iterable[Peer], now: float) -> list[Overdue]:
        """Returns those that have sent nothing for too long."""
        found = []
        for peer in peers:
            timeout_s = _HELLO_S if peer.member is None else peer.stall_timeout_s
            if timeout_s and now - peer.received_at > timeout_s:
                found.append(Overdue(peer, f"no heartbeat for {timeout_s:g} s"))
        return found

    def stalled(self, training: Sequence[Peer], *, is_interrupted: bool, now: float) -> list[Overdue] | NoProgress:
        """Returns the members that the others wait for, if no member of the current generation makes progress.

        Args:
            training: the members of the current generation, some of which do not hold.
            is_interrupted: whether one of them was lost, so that the others have to hold.
        """
        timeout_s = max((peer.stall_timeout_s for peer in training), default=0.0)
        if not timeout_s or now - self._progress_at <= timeout_s:
            return []
        self._progress_at = now
        behind = min(peer.heartbeats for peer in training)
        stalled = [peer for peer in training if peer.heartbeats == behind]
        if is_interrupted:
            stalled = [peer for peer in training if peer.member is not None and not peer.member.holds]
        if len(stalled) == len(training):
            return NoProgress(timeout_s)
        return [Overdue(peer, f"the others have waited for it for {timeout_s:g} s") for peer in stalled]
