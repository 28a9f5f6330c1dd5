"""When a round ends although no rank waits for another: ranks report to rank 0 over TCP, which decides by a rule."""

import selectors
import time

from hvdtrain.distributed.collectives import Collectives
from hvdtrain.fault_tolerance.channel import Connection, line_of, open_channel, wait_for
from hvdtrain.fault_tolerance.closing import ClosingRule, OpenUpdate


class RoundAgreement:
    """Ends each round on all ranks when a quorum of them is ready, after a grace period for the others.

    All ranks end the same rounds, in order. Messages are exchanged when a rank asks, between its steps: an average
    needs a contribution of each rank, which can only be made there. Collective: all ranks must construct it together.

    Args:
        quorum: the number of ranks that have to be ready; None, or more than there are: all.
        grace: see :class:`ClosingRule`.

    Raises:
        JobError: on all ranks, if one cannot connect to rank 0.
    """

    def __init__(self, collectives: Collectives, quorum: int | None, grace: float):
        self._rank, size = collectives.rank, collectives.size
        self._rule = ClosingRule(active=range(size), quorum=min(quorum or size, size), grace=grace)
        self._connections = open_channel(collectives).connections
        self._selector = selectors.DefaultSelector()
        for rank, connection in self._connections.items():
            self._selector.register(connection, selectors.EVENT_READ, rank)
        self._open = OpenUpdate(range(size))
        """On rank 0: who is ready to end the current round."""
        self._num_announced = 0
        """On other ranks: how many rounds rank 0 has ended."""
        self._round = 0
        self._is_ready = False
        self._began_s = time.monotonic()

    def has_ended(self, is_ready: bool) -> bool:
        """Whether the current round has ended; if so, the next one begins. Does not wait.

        Args:
            is_ready: this rank is ready to end it.

        Raises:
            ConnectionError: another rank is lost.
        """
        if is_ready and not self._is_ready:
            self._is_ready = True
            self._report(time.monotonic() - self._began_s)
        if not (self._decide() if self._rank == 0 else self._follow()):
            return False
        self._round += 1
        self._is_ready = False
        self._began_s = time.monotonic()
        return True

    def wait(self) -> None:
        """Waits until the current round has ended; this rank is ready to end it."""
        while not self.has_ended(is_ready=True):
            seconds = self._open.seconds_left(time.monotonic()) if self._rank == 0 else None
            wait_for(list(self._connections.values()), seconds)

    def close(self) -> None:
        """Disconnects this rank from the others."""
        self._selector.close()
        for connection in self._connections.values():
            connection.shut_down()
            connection.close()

    def _report(self, seconds: float) -> None:
        if self._rank == 0:
            self._open.ready(0, self._round, self._rule, seconds, time.monotonic())
        else:
            self._connections[0].send({"is_ready_to_end": self._round, "seconds": seconds})

    def _decide(self) -> bool:
        """On rank 0: ends the round if that is due, and notifies the other ranks."""
        now_s = time.monotonic()
        for key, _ in self._selector.select(0):
            rank = key.data
            connection = self._connections[rank]
            for message in connection.receive():
                self._open.ready(rank, message["is_ready_to_end"], self._rule, message["seconds"], now_s)
            _require_connected(connection, rank)
        if self._open.close(now_s) is None:
            return False
        for rank in self._rule.active:
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
