"""Which ranks have been silent, or have made no progress, for too long."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from hvdtrain.fault_tolerance.peers import Peer, send_all
from hvdtrain.fault_tolerance.stall_detection import Position, StallDetector, stack_of
from hvdtrain.system.terminal import some_of


class Failure(NamedTuple):
    """Why a job has to end."""

    text: str
    details: str = ""
    """Additional lines."""
    after_s: float = 0.0
    """How much later than this rank another rank may detect the same failure."""


class RankTimeouts:
    """One rank's deadlines for the ranks that it is connected to; rank 0 also measures the progress of all ranks.

    Args:
        rank: this rank.
        peers: the connected ranks, some of which may leave.
        names: the names of all ranks in messages.
        position: returns the main thread's latest heartbeat.
        main_thread: the identifier of the thread whose stack is reported.
        stall_timeout_s: how long a rank may be silent, or all ranks make no progress; 0: forever.
        heartbeat_interval_s: time between two heartbeats of a rank.
        now: the current time of a monotonic clock, as in all methods.
    """

    def __init__(
        self,
        rank: int,
        peers: Mapping[int, Peer],
        *,
        names: Sequence[str],
        position: Callable[[], Position],
        main_thread: int,
        stall_timeout_s: float,
        heartbeat_interval_s: float,
        now: float,
    ):
        self._rank = rank
        self._peers = peers
        self._names = names
        self._position = position
        self._main_thread = main_thread
        self._stall_timeout_s = stall_timeout_s
        self._heartbeat_interval_s = heartbeat_interval_s
        self._check_peers_at = now
        self._stall = StallDetector(now)

    def update(self, peer: Peer, position: Position, now: float) -> None:
        """Records a position that another rank has sent."""
        peer.position = position
        self._stall.update(peer.rank, position, now)

    def add_stack(self, peer: Peer, stack: list[str]) -> None:
        """Records the stack that another rank has sent after its position."""
        self._stall.add_stack(peer.rank, peer.position, stack)

    def reset_stall(self, now: float) -> None:
        """Restarts the measurement of progress."""
        self._stall.reset(now)

    def extend(self, gap_s: float) -> None:
        """Extends all deadlines by a time for which this process did not run."""
        self._stall.extend(gap_s)
        for peer in self._peers.values():
            peer.received_at += gap_s

    def failure(self, now: float) -> Failure | None:
        """Returns why the job has to end, if a deadline has passed."""
        if not self._stall_timeout_s:
            return None
        return self._silent_rank(now) or (self._stalled(now) if self._rank == 0 else None)

    def _silent_rank(self, now: float) -> Failure | None:
        if now < self._check_peers_at:
            return None
        # Not at each of many messages: this looks at all ranks.
        self._check_peers_at = now + self._heartbeat_interval_s / 4
        for peer in self._peers.values():
            if now - peer.received_at > self._stall_timeout_s:
                text = f"no heartbeat from {peer.name} for {self._stall_timeout_s:g} s, last seen {peer.position}."
                # Each rank detects it on its own, up to one heartbeat interval after another rank.
                return Failure(text, after_s=2 * self._heartbeat_interval_s)
        return None

    def _stalled(self, now: float) -> Failure | None:
        own = self._position()
        self._stall.update(0, own, now)
        if self._stall.stalled_s(now) <= self._stall_timeout_s:
            return None
        if any(now - peer.received_at > 2 * self._heartbeat_interval_s for peer in self._peers.values()):
            return None  # A rank is stopped or disconnected: its own timeout will name it.
        if not self._stall.stacks_requested:
            self._stall.stacks_requested = True
            self._stall.add_stack(0, own, stack_of(self._main_thread))
            send_all(self._peers.values(), {"kind": "send stack"})
        elif self._stall.num_stacks > len(self._peers):
            behind = some_of([self._names[rank] for rank in self._stall.ranks_behind()])
            waiting = f"; the others wait for {behind}" if behind else ""
            text = f"no rank made progress for {self._stall_timeout_s:g} s{waiting}."
            return Failure(text, details="\n" + self._stall.report(self._names.__getitem__))
        return None
