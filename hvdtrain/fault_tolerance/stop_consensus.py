"""All ranks stop at the same point of the run, agreed on without a collective.

The points are the checks that all ranks pass in the same order. A proposal to stop makes each rank report
how many checks it has passed and block at its next one; the decision is the first check that no rank has
passed. A blocked rank waits only for the monitor threads, and these never wait for a main thread: ranks in
the middle of a reduction answer too, and the ranks that they wait for proceed to that reduction.
"""

import threading
from collections.abc import Callable

from hvdtrain.fault_tolerance.channel import Message


class StopPoint:
    """The state of one rank. The main thread calls :meth:`check`; its control thread calls the other methods."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._passed = 0
        self._is_pending = False
        self.decision: int | None = None
        """The check at which all ranks stop, once it is decided."""
        self.reason: str | None = None

    @property
    def is_requested(self) -> bool:
        """True from the proposal on."""
        return self._is_pending or self.decision is not None

    def check(self) -> bool:
        """Passes one check and returns False, or returns True if all ranks stop at this check."""
        with self._changed:
            number = self._passed + 1
            while self._is_pending:
                self._changed.wait()
            if self.decision is not None and number >= self.decision:
                return True
            self._passed = number
            return False

    def propose(self, reason: str) -> int:
        """Blocks the main thread at its next check; returns the number of checks it has passed."""
        with self._changed:
            self._is_pending = True
            self.reason = reason
            return self._passed

    def decide(self, check: int) -> None:
        """Sets the check at which all ranks stop."""
        with self._changed:
            self.decision = check
            self._is_pending = False
            self._changed.notify_all()

    def restart(self) -> None:
        """Starts to count from 0 again: all ranks have stopped at a check, and continue together."""
        with self._changed:
            self._passed = 0
            self._is_pending = False
            self.decision = None
            self._changed.notify_all()

    def withdraw(self) -> int:
        """Unblocks the main thread when no decision can follow; returns the number of checks passed.

        Rank 0 has left and so has passed all checks of the run; the other ranks must pass them too.
        """
        with self._changed:
            self._is_pending = False
            self._changed.notify_all()
            return self._passed


class StopVote:
    """Rank 0's count of the answers to a job's only proposal.

    Args:
        size: number of ranks that answer.
    """

    def __init__(self, size: int):
        self._size = size
        self._passed: dict[int, int] = {}
        self._is_open = False
        self._is_decided = False

    def open(self) -> bool:
        """Returns True on the first call only: there is one proposal, however many ranks request a stop."""
        is_first = not self._is_open
        self._is_open = True
        return is_first

    def record(self, rank: int, passed: int) -> None:
        """Records a rank's number of passed checks, also when it leaves: that number is then final."""
        self._passed[rank] = passed

    def decision(self) -> int | None:
        """Returns the first check that no rank has passed, once; None while answers are missing and afterwards."""
        if not self._is_open or self._is_decided or len(self._passed) < self._size:
            return None
        self._is_decided = True
        return max(self._passed.values()) + 1


class StopConsensus:
    """A rank's part in the agreement: rank 0 proposes a stop and counts the answers of all ranks.

    Args:
        rank: this rank.
        size: number of ranks.
        stop_point: shared with the main thread.
        send_all: sends a message from rank 0 to all other ranks, from other ranks to rank 0.
    """

    def __init__(self, rank: int, size: int, *, stop_point: StopPoint, send_all: Callable[[Message], None]):
        self._rank = rank
        self._stop_point = stop_point
        self._send_all = send_all
        self._vote = StopVote(size)

    def request(self, reason: str) -> None:
        """Requests that all ranks stop at the same check."""
        if self._rank == 0:
            self._propose(reason)
        else:
            self._send_all({"kind": "stop", "reason": reason})

    def handle(self, rank: int, message: Message) -> None:
        """Handles a message of another rank if it concerns a stop."""
        match message:
            case {"kind": "stop", "reason": reason}:
                self._propose(reason)
            case {"kind": "propose", "reason": reason}:
                self._send_all({"kind": "answer", "passed": self._stop_point.propose(reason)})
            case {"kind": "answer", "passed": passed}:
                self._record(rank, passed)
            case {"kind": "decision", "check": check}:
                self._stop_point.decide(check)

    def note_left(self, rank: int, passed: int) -> None:
        """Notes that another rank has left after this number of checks."""
        if self._rank == 0:
            self._record(rank, passed)
        else:
            self._stop_point.withdraw()

    def _propose(self, reason: str) -> None:
        if self._vote.open():
            self._send_all({"kind": "propose", "reason": reason})
            self._record(0, self._stop_point.propose(reason))

    def _record(self, rank: int, passed: int) -> None:
        self._vote.record(rank, passed)
        decision = self._vote.decision()
        if decision is not None:
            self._send_all({"kind": "decision", "check": decision})
            self._stop_point.decide(decision)
