"""Ranks without a main thread: real monitors and connections, thousands of them polled by a few processes."""

import heapq
import math
import multiprocessing
import random
import resource
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection as Pipe
from typing import Any, NoReturn

from hvdtrain.fault_tolerance import channel, monitor_thread
from hvdtrain.fault_tolerance.channel import Channel
from hvdtrain.fault_tolerance.monitor_thread import MonitorThread
from hvdtrain.fault_tolerance.peers import heartbeat_interval_s
from hvdtrain.fault_tolerance.stall_detection import Position
from hvdtrain.fault_tolerance.stop_consensus import StopPoint

_LOOPBACK = "127.0.0.1"


class EndedError(Exception):
    """Raised where a real rank would end its process."""


class _Monitor(MonitorThread):
    """A monitor that is polled instead of running on a thread of its own."""

    def _end(self, code: int, *, after_s: float = 0.0) -> NoReturn:
        raise EndedError(code)

    def request(self, reason: str) -> None:
        self._request_stop(reason)


class SimulatedRank:
    """One rank other than 0, whose clock can be set back.

    Args:
        hosts: of all ranks.
    """

    def __init__(self, rank: int, hosts: list[str], connection: channel.Connection, stall_timeout_s: float):
        self.rank = rank
        self.connection = connection
        self.lag_s = 0.0
        """How much its clock is slow."""
        self.stop_point = StopPoint()
        self.monitor = _Monitor(
            rank,
            Channel(hosts, {0: connection}),
            stop_point=self.stop_point,
            position=lambda: Position(1, "training", 1),
            exit_actions=lambda: None,
            stall_timeout_s=stall_timeout_s,
            clock=lambda: time.monotonic() - self.lag_s,
        )

    @property
    def due_at(self) -> float:
        """When it has to be polled at the latest."""
        return self.monitor.due_at + self.lag_s


class RankGroup:
    """The simulated ranks of one process, which obeys the commands of a :class:`SimulatedRanks`."""

    def __init__(self, pipe: Pipe, ranks: Sequence[int], hosts: list[str], stall_timeout_s: float):
        self._pipe = pipe
        self._numbers = ranks
        self._hosts = hosts
        self._stall_timeout_s = stall_timeout_s
        self._ranks: dict[int, SimulatedRank] = {}
        self._selector = selectors.EpollSelector()
        self._selector.register(pipe, selectors.EVENT_READ)
        self._codes: dict[int, int] = {}
        self._decided_at: dict[int, float] = {}
        self._ended_at = 0.0
        self._is_running = True
        self._due: list[tuple[float, int]] = []
        """When ranks have to be polled at the latest; also deadlines that have passed or moved."""

    def run(self) -> None:
        """Obeys commands and polls the ranks until told to end."""
        while self._is_running:
            wait_s = self._due[0][0] - time.monotonic() if self._due else None
            ready = self._selector.select(None if wait_s is None else max(0.0, wait_s))
            # Each once: a rank that has nothing to do would wait for its next heartbeat.
            ranks = {key.data for key, _ in ready if key.data is not None}
            now = time.monotonic()
            while self._due and self._due[0][0] <= now:
                ranks.add(heapq.heappop(self._due)[1])
            for rank in ranks:
                self._poll(rank)
            if any(key.data is None for key, _ in ready):
                name, *arguments = self._pipe.recv()
                getattr(self, name)(*arguments)

    def _poll(self, rank: int) -> None:
        if rank not in self._ranks:
            return
        each = self._ranks[rank]
        was_decided = each.stop_point.decision is not None
        try:
            each.monitor.poll(wait_s=0.0)
        except EndedError as ended:
            self._codes[rank] = ended.args[0]
            self._close(rank)
            return
        if each.stop_point.decision is not None and not was_decided:
            self._decided_at[rank] = time.monotonic()
        if not each.monitor.peers:  # rank 0 has left
            self._close(rank)
        else:
            heapq.heappush(self._due, (each.due_at, rank))

    def _close(self, rank: int) -> None:
        each = self._ranks.pop(rank)
        self._selector.unregister(each.connection)
        each.monitor.abandon()
        self._ended_at = time.monotonic()

    # Commands.

    def connect(self, endpoint: Any, timeout_s: float | None = None) -> None:
        """Connects all ranks at once, as those of a job; sends the number of those that could not.

        Args:
            timeout_s: default: that of a job with as many ranks.
        """
        _, port, token = endpoint
        self._codes, self._decided_at = {}, {}
        connections = {}
        with selectors.EpollSelector() as selector:
            for rank in self._numbers:
                connecting = socket.socket()
                connecting.setblocking(False)
                connecting.connect_ex((_LOOPBACK, port))
                connections[rank] = channel.Connection(connecting)
                selector.register(connections[rank], selectors.EVENT_WRITE, rank)
            timeout_s = channel.connect_timeout_s(len(self._hosts)) if timeout_s is None else timeout_s
            until = time.monotonic() + timeout_s
            while selector.get_map() and time.monotonic() < until:
                for key, events in selector.select(1.0):
                    connection, rank = connections[key.data], key.data
                    if events & selectors.EVENT_WRITE:  # It is connected.
                        connection.send({"kind": "hello", "token": token, "rank": rank})
                        selector.modify(connection, selectors.EVENT_READ, rank)
                    elif connection.receive() == [{"kind": "welcome"}]:
                        selector.unregister(connection)
                        self._ranks[rank] = SimulatedRank(rank, self._hosts, connection, self._stall_timeout_s)
            num_missing = len(selector.get_map())
        for rank, each in self._ranks.items():
            # Ranks of a job do not send their heartbeats at the same moment.
            each.lag_s = random.random() * heartbeat_interval_s(len(self._hosts), self._stall_timeout_s)
            heapq.heappush(self._due, (each.due_at, rank))
            self._selector.register(each.connection, selectors.EVENT_READ, rank)
        self._pipe.send(num_missing)

    def stop(self, rank: int) -> None:
        """Makes a rank request a stop, as if it had received a signal."""
        began = time.monotonic()
        if rank in self._ranks:
            self._ranks[rank].monitor.request("a test")
        self._pipe.send(began if rank in self._ranks else math.inf)

    def decisions(self) -> None:
        """Sends how many ranks know the check at which to stop, the checks, and when the last one learnt it."""
        checks = {each.stop_point.decision for each in self._ranks.values()} - {None}
        self._pipe.send((len(self._decided_at), checks, max(self._decided_at.values(), default=0.0)))

    def lose(self, ranks: Sequence[int]) -> None:
        """Closes the connections of ranks without a word, as the kernel does for a killed process."""
        mine = [rank for rank in ranks if rank in self._ranks]
        began = time.monotonic()
        for rank in mine:
            self._close(rank)
        self._pipe.send(began if mine else math.inf)

    def suspend(self) -> None:
        """Polls no rank until the next command. Their clocks stand still, so that heartbeats stay spread."""
        began = time.monotonic()
        self._pipe.poll(None)
        gap_s = time.monotonic() - began
        for each in self._ranks.values():
            each.lag_s += gap_s
        self._due = [(at + gap_s, rank) for at, rank in self._due]

    def resume(self) -> None:
        """Ends a suspension."""

    def left(self) -> None:
        """Sends how many ranks are connected, the exit codes of ended ones, and when the last one ended."""
        self._pipe.send((len(self._ranks), dict(self._codes), self._ended_at))

    def finish(self) -> None:
        """Ends the process."""
        self._is_running = False


def _run_group(*arguments: Any) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # Each rank of a job looks for its launcher once; here, thousands would look for the same one, for 10 s.
    monitor_thread.processes.horovodrun_above = lambda: None
    RankGroup(*arguments).run()


class SimulatedRanks:
    """All ranks of a job but rank 0, in a few processes.

    Args:
        hosts: of all ranks.
    """

    def __init__(self, hosts: list[str], *, processes: int, stall_timeout_s: float = 600.0):
        context = multiprocessing.get_context("spawn")
        self.size = len(hosts)
        self._pipes, self.processes = [], []
        for part in range(processes):
            own, other = context.Pipe()
            ranks = range(1 + part, self.size, processes)
            arguments = (other, ranks, hosts, stall_timeout_s)
            self.processes.append(context.Process(target=_run_group, args=arguments, daemon=True))
            self.processes[-1].start()
            self._pipes.append(own)

    def ask(self, command: str, *arguments: Any) -> list[Any]:
        """The answer of each process to a command."""
        self.tell(command, *arguments)
        return [pipe.recv() for pipe in self._pipes]

    def tell(self, command: str, *arguments: Any) -> None:
        """Sends a command to each process."""
        for pipe in self._pipes:
            pipe.send((command, *arguments))

    def answers(self) -> list[Any]:
        """The answer of each process to a command that was told."""
        return [pipe.recv() for pipe in self._pipes]

    def close(self) -> None:
        """Ends the processes."""
        self.tell("finish")
        for process in self.processes:
            process.join(10)


class FirstRank:
    """The collectives of rank 0 of a job whose other ranks are simulated.

    Args:
        connect: makes the others connect to an endpoint; it may return before they have.
        num_missing: waits for them; the number of ranks that could not connect.
    """

    rank = 0

    def __init__(self, hosts: list[str], connect: Callable[[Any], None], num_missing: Callable[[], int]):
        self.size = len(hosts)
        self._hosts = hosts
        self._connect = connect
        self._num_missing = num_missing

    def allgather(self, value: Any) -> list[Any]:
        if hasattr(value, "token"):
            self._connect(tuple(value))
        return self._hosts if isinstance(value, str) else [value] + [None] * (self.size - 1)

    def sum(self, arrays: list[Any]) -> list[Any]:
        # The number of ranks on which opening the channel has failed.
        return [arrays[0] + self._num_missing()]
