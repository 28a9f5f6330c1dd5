"""All ranks stop at the same point of the run, agreed upon without a collective.

The points are the checks that every rank passes in the same order. A proposal to stop makes each rank
say how many it has passed and hold still at its next one; the decision is the first check that no rank
has passed. A rank that holds still waits for the control threads alone, and these wait for nobody's
main thread: ranks that are deep in a reduction answer too, and those they wait for go on to join it.
"""

import threading


class StopPoint:
    """One rank's side. The main thread checks, the control thread does the rest."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._passed = 0
        self._is_pending = False
        self._decision: int | None = None
        self.reason: str | None = None

    @property
    def is_coming(self) -> bool:
        """True from the proposal on."""
        return self._is_pending or self._decision is not None

    def check(self) -> bool:
        """Passes one check and gives back False, or True where all ranks are to stop at this one."""
        with self._changed:
            number = self._passed + 1
            while self._is_pending:
                self._changed.wait()
            if self._decision is not None and number >= self._decision:
                return True
            self._passed = number
            return False

    def propose(self, reason: str) -> int:
        """Holds the main thread at its next check and gives back how many it has passed."""
        with self._changed:
            self._is_pending = True
            self.reason = reason
            return self._passed

    def decide(self, check: int) -> None:
        """Names the check at which all ranks stop."""
        with self._changed:
            self._decision = check
            self._is_pending = False
            self._changed.notify_all()

    def withdraw(self) -> int:
        """Lets the main thread go on where no decision can come any more; gives back the checks passed.

        Rank 0 has left, hence passed all the checks there are; the others are to pass them too.
        """
        with self._changed:
            self._is_pending = False
            self._changed.notify_all()
            return self._passed


class StopVote:
    """Rank 0's side: the answers to the one proposal of a job.

    Args:
        size: how many ranks answer.
    """

    def __init__(self, size: int):
        self._size = size
        self._passed: dict[int, int] = {}
        self._is_open = False
        self._is_decided = False

    def open(self) -> bool:
        """Gives back True the first time: there is one proposal, however many ranks are asked to stop."""
        is_first = not self._is_open
        self._is_open = True
        return is_first

    def record(self, rank: int, passed: int) -> None:
        """Takes an answer; also that of a rank that leaves, which has passed all it ever will."""
        self._passed[rank] = passed

    def decision(self) -> int | None:
        """The first check that no rank has passed, once; None while an answer is missing, and afterwards."""
        if not self._is_open or self._is_decided or len(self._passed) < self._size:
            return None
        self._is_decided = True
        return max(self._passed.values()) + 1
