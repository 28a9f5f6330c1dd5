"""A thread of each rank that sends gradients: it takes part in every update, also while its rank still computes.

Ranks report to rank 0 over TCP that they have made their micro-batches. Its thread closes the update and notifies the
threads of all ranks, which then sum up the contributors' gradients; the others send zeros.
"""

import dataclasses
import queue
import socket
import time
from collections.abc import Sequence

import tensorflow as tf

from hvdtrain.distributed.collectives import Collectives
from hvdtrain.fault_tolerance.channel import Channel, Connection, wait_for
from hvdtrain.fault_tolerance.closing import ClosingRule, OpenUpdate
from hvdtrain.system.background import BackgroundTask

Buckets = Sequence[tf.Tensor]

# For a thread in a reduction that never ends, because another rank is lost.
_CLOSE_S = 3.0


@dataclasses.dataclass(frozen=True)
class ClosedUpdate:
    """What all ranks have sent for an update."""

    contributors: tuple[int, ...]
    sums: Buckets
    """The contributors' gradients, summed."""
    closed_s: float
    """When this rank knew that it was closed, by ``time.perf_counter``."""


class GradientExchange:
    """Sums up the gradients of the ranks that are ready, update by update, on a separate thread.

    The methods are for the main thread.

    Args:
        channel: connects rank 0 to all other ranks; it is closed with the exchange.
        zeros: what a rank that does not contribute sends.
        first_update: the number of the first update, the same on every rank.
    """

    def __init__(self, collectives: Collectives, channel: Channel, zeros: Buckets, first_update: int = 0):
        self._collectives = collectives
        self._zeros = zeros
        self._own: Buckets = zeros
        self._closed: queue.SimpleQueue[ClosedUpdate | BaseException] = queue.SimpleQueue()
        self._connections = dict(channel.connections)
        self._announced: list[tuple[int, ...]] = []
        self._is_expected = True
        """Whether rank 0 knows without a message that this rank computes for the next update."""
        self._began_s = 0.0
        self._is_closed = False
        if collectives.rank == 0:
            # This rank's main thread reports like the other ranks.
            mine, its = socket.socketpair()
            self._to_first_rank = Connection(mine)
            self._connections[0] = Connection(its)
            self._open = OpenUpdate(range(collectives.size), first_update)
        else:
            self._to_first_rank = self._connections[0]
        self._thread = BackgroundTask(self._run, "hvdtrain-quorum")

    def begin(self, update: int) -> None:
        """Reports that this rank computes a micro-batch for an update."""
        self._began_s = time.perf_counter()
        if not self._is_expected:
            self._to_first_rank.send({"begins": update})

    def offer(self, update: int, gradients: Buckets, rule: ClosingRule) -> None:
        """Reports that this rank has made its micro-batch for an update, which closes by a rule."""
        # The thread reads it when the update closes with this rank; until then, no other one is offered.
        self._own = gradients
        seconds = time.perf_counter() - self._began_s
        self._to_first_rank.send({"has_made": update, "seconds": seconds, "rule": dataclasses.asdict(rule)})

    @property
    def has_closed(self) -> bool:
        """Whether an update has closed that was not taken yet."""
        return not self._closed.empty()

    def take(self) -> ClosedUpdate:
        """The next update, in order; waits until it has closed.

        Raises:
            ConnectionError: another rank is lost.
        """
        closed = self._closed.get()
        if isinstance(closed, BaseException):
            raise closed
        self._is_expected = self._collectives.rank in closed.contributors
        return closed

    def close(self) -> None:
        """Ends the thread; call it when no rank waits for an update, or when the job ends with an error."""
        if self._is_closed:
            return
        self._is_closed = True
        connections = {self._to_first_rank, *self._connections.values()}
        for connection in connections:
            connection.shut_down()
        self._thread.wait(_CLOSE_S)
        for connection in connections:
            connection.close()

    def _run(self) -> None:
        try:
            serve = self._decide if self._collectives.rank == 0 else self._follow
            while (contributors := serve()) is not None:
                closed_s = time.perf_counter()
                own = self._own if self._collectives.rank in contributors else self._zeros
                sums = self._collectives.sum_on_this_thread(own)
                self._closed.put(ClosedUpdate(contributors, sums, closed_s))
        except BaseException as error:
            if not self._is_closed:
                self._closed.put(error)

    def _decide(self) -> tuple[int, ...] | None:
        """Waits until an update is to be closed, and notifies the other ranks; None after :meth:`close`."""
        while (contributors := self._open.close(time.monotonic())) is None:
            wait_for(list(self._connections.values()), self._open.seconds_left(time.monotonic()))
            now_s = time.monotonic()
            for rank, connection in self._connections.items():
                for message in connection.receive():
                    if "begins" in message:
                        self._open.begin(rank, message["begins"])
                    else:
                        rule = ClosingRule(**message["rule"])
                        self._open.ready(rank, message["has_made"], rule, message["seconds"], now_s)
                if not self._is_connected(connection, rank):
                    return None
        for rank, connection in self._connections.items():
            if rank != 0:
                connection.send({"contributors": contributors})
        return contributors

    def _follow(self) -> tuple[int, ...] | None:
        """Waits until rank 0 has closed an update; None after :meth:`close`."""
        while not self._announced:
            connection = self._connections[0]
            wait_for([connection], None)
            self._announced += [tuple(message["contributors"]) for message in connection.receive()]
            if not self._announced and not self._is_connected(connection, 0):
                return None
        return self._announced.pop(0)

    def _is_connected(self, connection: Connection, rank: int) -> bool:
        """False after :meth:`close`.

        Raises:
            ConnectionError: the other rank has closed its end instead.
        """
        if connection.is_lost and not self._is_closed:
            # Named as a consequence: the job watch of another rank knows the cause.
            raise ConnectionError(
                f"lost connection to rank {rank}, which can take part in no further Horovod reduction"
            )
        return not self._is_closed
