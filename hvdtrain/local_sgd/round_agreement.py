"""When a round ends although no rank waits for another: ranks report to rank 0 over TCP, which decides by a rule."""

import selectors
import time

from hvdtrain.distributed.collectives import Collectives
from hvdtrain.fault_tolerance.channel import Connection, Message, line_of, open_channel, wait_for
from hvdtrain.fault_tolerance.closing import ClosingRule, OpenUpdate


class RoundAgreement:
    """Ends each round on all ranks when a quorum of them is ready, after a grace period for the others.

    All ranks end the same rounds, in order. Messages are exchanged when a rank asks, between its steps: an average
    needs a contribution of each rank, which can only be made there. Collective: all ranks must construct it together.

    Args:
        quorum: the number of ranks that have to be ready, of those that make steps; None, or more than there are: all.
        grace: see :class:`ClosingRule`.

    Raises:
        JobError: on all ranks, if one cannot connect to rank 0.
    """

    def __init__(self, collectives: Collectives, quorum: int | None, grace: float):
        self._rank, size = collectives.rank, collectives.size
        self._quorum, self._grace = quorum or size, grace
        self._ranks = range(size)
        self._connections = open_channel(collectives).connections
        self._selector = selectors.DefaultSelector()
        for rank, connection in self._connections.items():
            self._selector.register(connection, selectors.EVENT_READ, rank)
        self._open = OpenUpdate(self._ranks)
        """On rank 0: who is ready to end the current round."""
        self._finished: set[int] = set()
        """On rank 0: the ranks that make no more steps."""
        self._num_announced = 0
        """On other ranks: how many rounds rank 0 has ended."""
        self._round = 0
        self._is_ready = False
        self._began_s = time.monotonic()

    def has_ended(self, is_ready: bool, *, is_finished: bool = False) -> bool:
        """Whether the current round has ended; if so, the next one begins. Does not wait.

        Args:
            is_ready: this rank is ready to end it.
            is_finished: this rank makes no more steps.

        Raises:
            ConnectionError: another rank is lost.
        """
        if is_ready and not self._is_ready:
            self._is_ready = True
            self._report(time.monotonic() - self._began_s, is_finished)
        if not (self._decide() if self._rank == 0 else self._follow()):
            return False
        self._round += 1
        self._is_ready = False
        self._began_s = time.monotonic()
        return True

    def wait(self) -> None:
        """Waits until the current round has ended; this rank makes no more steps."""
        while not self.has_ended(is_ready=True, is_finished=True):
            seconds = self._open.seconds_left(time.monotonic()) if self._rank == 0 else None
            wait_for(list(self._connections.values()), seconds)

    def close(self) -> None:
        """Disconnects this rank from the others."""
        self._selector.close()
        for connection in self._connections.values():
            connection.shut_down()
            connection.close()

    def _report(self, seconds: float, is_finished: bool) -> None:
        report = {"is_ready_to_end": self._round, "seconds": seconds, "is_finished": is_finished}
        if self._rank == 0:
            self._note(0, report, time.monotonic())
        else:
            self._connections[0].send(report)

    def _note(self, rank: int, report: Message, now_s: float) -> None:
        """On rank 0: notes that a rank is ready."""
        if report["is_finished"]:
            self._finished.add(rank)
        # Ranks that make no steps would end each round at once.
        active = [each for each in self._ranks if each not in self._finished] or self._ranks
        rule = ClosingRule(active=active, quorum=min(self._quorum, len(active)), grace=self._grace)
        self._open.ready(rank, report["is_ready_to_end"], rule, report["seconds"], now_s)

    def _decide(self) -> bool:
        """On rank 0: ends the round if that is due, and notifies the other ranks."""
        now_s = time.monotonic()
        for key, _ in self._selector.select(0):
            rank = key.data
            connection = self._connections[rank]
            for message in connection.receive():
                self._note(rank, message, now_s)
            _require_connected(connection, rank)
        if self._open.close(now_s) is None:
            return False
        for rank in self._ranks:
            # Each rank trains on at once, also one that was not ready.
            self._open.begin(rank, self._open.number)
        line = line_of({"ended": self._open.number})
        for connection in self._connections.values():
            connection.send_line(line)
        return True

    def _follow(self) -> bool:
        """On other ranks: whether rank 0 has ended the round."""
        connection = self._connections[0]
        for message in connection.receive():
            self._num_announced = message["ended"]
        if self._num_announced > self._round:
            return True
        _require_connected(connection, 0)
        return False


def _require_connected(connection: Connection, rank: int) -> None:
    if connection.is_lost:
        # Named as a consequence: the job watch knows the cause.
        raise ConnectionError(f"lost connection to rank {rank}, which can take part in no further Horovod reduction")
