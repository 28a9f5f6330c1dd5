"""A process of an elastic job: follows the coordinator, on a thread of its own, while the main thread trains."""

import contextlib
import dataclasses
import json
import os
import selectors
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from hvdtrain.errors import DisagreementError, HvdtrainError, StoppedEarly, UsageError
from hvdtrain.fault_tolerance.channel import Connection, Message
from hvdtrain.fault_tolerance.elastic.coordinator import HEARTBEAT_S
from hvdtrain.fault_tolerance.elastic.generation import Generation, Place
from hvdtrain.fault_tolerance.elastic.hello import Hello
from hvdtrain.fault_tolerance.job_watch import JobWatch
from hvdtrain.fault_tolerance.monitor_thread import EXIT_ACTIONS_S
from hvdtrain.fault_tolerance.signals import StopSignals, names_in
from hvdtrain.fault_tolerance.stall_detection import Position
from hvdtrain.fault_tolerance.stop_consensus import StopPoint
from hvdtrain.system import environment, network, processes
from hvdtrain.system.background import run_with_timeout
from hvdtrain.system.terminal import write

_CONNECT_S = 10.0
_WELCOME_S = 10.0
_SAME_SIGNAL_S = 1.0
_DRAIN_S = 1.0
_REPORT_S = 1.0
# The coordinator hears of a lost process within milliseconds, as this one's reductions do.
_CUT_S = 5.0


class MembershipChange(Exception):  # noqa: N818
    """The members of the job change: the current generation is over. Raised by hvdtrain for its training loop."""


class CoordinatorLink(threading.Thread):
    """This process's connection to the coordinator, and the thread that serves it.

    Args:
        endpoint: ``host:port`` of the coordinator.
        token: proves that this process belongs to the job.
        facts: what must be equal in all processes.
        stop_point: shared with the main thread.
        position: returns the main thread's latest heartbeat.
        exit_actions: called before the coordinator ends this process.
        stall_timeout_s: ends this process if the coordinator is silent for so long; 0: never.
    """

    def __init__(
        self,
        endpoint: tuple[str, int],
        token: str,
        facts: Mapping[str, Any],
        *,
        stop_point: StopPoint,
        position: Callable[[], Position],
        exit_actions: Callable[[], None],
        stall_timeout_s: float,
    ):
        super().__init__(name="hvdtrain-member", daemon=True)
        self._stop_point = stop_point
        self._position = position
        self._exit_actions = exit_actions
        self._stall_timeout_s = stall_timeout_s
        self._connection = _connect(endpoint)
        hello = Hello(network.host_name(), os.getpid(), environment.elastic_worker(), dict(facts), stall_timeout_s)
        self._connection.send(hello.message(token))
        welcome, *self._early = _first_messages(self._connection, endpoint)
        if welcome["kind"] == "refused":
            raise DisagreementError(welcome["text"])
        if welcome["kind"] == "end":
            raise StoppedEarly("the job that this process was started for has ended.")
        self.number: int = welcome["member"]
        self.must_warm_up: bool = welcome["must_warm_up"]
        """Whether the job trains already, so that this process compiles before it joins."""
        self.start_size: int = welcome["start_size"]
        """The number of ranks that ``--batch-size`` counts for, whatever their number is now."""
        self._changed = threading.Condition()
        self._generation: Generation | None = None
        self._next: Generation | None = None
        self._is_cut = False
        self._is_dismissed = False
        self._stops = False
        self._cut: Callable[[], None] | None = None
        self._signals = StopSignals()
        self._signalled_at: float | None = None
        self._received_at = self._heartbeat_at = time.monotonic()
        self._requests: deque[Callable[[], None]] = deque()
        self._wake_reader, self._wake_writer = socket.socketpair()
        for end in (self._wake_reader, self._wake_writer):
            end.setblocking(False)
        self._selector = selectors.PollSelector()
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._selector.register(self._connection, selectors.EVENT_READ)
        self._is_closing = False

    # Called from the main thread.

    def watch_signals(self) -> None:
        """Catches signals from now on; starts the thread."""
        self._signals.install(self._wake_writer.fileno())
        self.start()

    def cut_with(self, cut: Callable[[], None]) -> None:
        """Sets what makes the reductions of this process fail at once. From now on, ranks may change."""
        with self._changed:
            self._cut = cut
            if self._is_cut:
                cut()

    def restart_all(self) -> NoReturn:
        """Starts all members again: they resume from the last checkpoint."""
        self._send({"kind": "restart"})
        while True:  # Until this process is replaced, or ended.
            time.sleep(1.0)

    @property
    def must_hold(self) -> bool:
        """Whether the current generation is over, or pauses for a change of members."""
        with self._changed:
            return self._is_cut or not self._stops

    @property
    def is_cut(self) -> bool:
        """Whether the current generation is over, because a member was lost."""
        with self._changed:
            return self._is_cut

    def is_ready(self) -> None:
        """Reports that this process could train at once."""
        self._send({"kind": "ready"})

    @property
    def interface(self) -> str:
        """The network interface that leads to the coordinator, and so to the other members."""
        address = self._connection.address
        return network.interface_with(address) or ("lo" if address.startswith("127.") else "")

    def wait_for_cut(self) -> bool:
        """Reports that reductions fail, and waits for the coordinator to end the generation; False if it does not."""
        if self._generation is not None:
            self._send({"kind": "broken", "generation": self._generation.number})
        with self._changed:
            self._changed.wait_for(lambda: self._is_cut, _CUT_S)
            return self._is_cut

    def next_generation(self) -> Generation | None:
        """Holds until the next generation begins; None if this process leaves the job."""
        if self._generation is not None:
            self._send({"kind": "hold", "generation": self._generation.number})
        with self._changed:
            self._changed.wait_for(lambda: self._next is not None or self._is_dismissed)
            self._generation, self._next = self._next, None
            return self._generation

    def exit(self) -> NoReturn:
        """Ends this process, which has left the job."""
        self._end(0)

    def request_stop(self, reason: str) -> None:
        self._send({"kind": "stop", "reason": reason})

    def fail(self, code: int) -> None:
        """Ends all members with this exit code."""
        self._send({"kind": "end", "code": code})
        self.join(_DRAIN_S)

    def wait_for_end(self, timeout_s: float) -> None:
        """Returns after a timeout, unless the coordinator ends this process first."""
        self.join(timeout_s)

    def close(self, *, ends_process: bool = False) -> None:
        """Disconnects; the coordinator does not take it for a loss."""
        self._signals.restore(ignore=ends_process)

        def say_bye() -> None:
            self._connection.send({"kind": "bye"})
            self._is_closing = True

        self._call(say_bye)
        self.join(_DRAIN_S)
        self._connection.close()

    def _send(self, message: Message) -> None:
        self._call(lambda: self._connection.send(message))

    def _call(self, request: Callable[[], None]) -> None:
        self._requests.append(request)
        with contextlib.suppress(BlockingIOError):  # It is awake already.
            self._wake_writer.send(bytes(1))

    # Called from this thread.

    def run(self) -> None:
        try:
            for message in self._early:
                self._handle(message)
            while not self._is_closing:
                self._poll()
        except Exception:
            run_with_timeout(
                _REPORT_S, lambda: write(f"hvdtrain: the thread of member {self.number} failed\n{_last_traceback()}")
            )
            os._exit(1)

    def _poll(self) -> None:
        self._selector.select(max(0.0, self._heartbeat_at - time.monotonic()))
        with contextlib.suppress(BlockingIOError):
            for name in names_in(self._wake_reader.recv(4096)):
                self._handle_signal(name)
        while self._requests:
            self._requests.popleft()()
        for message in self._connection.receive():
            self._received_at = time.monotonic()
            self._handle(message)
        if self._connection.is_lost and not self._is_closing and not self._is_dismissed:
            self._leave_alone("lost the connection to the coordinator")
        now = time.monotonic()
        if now >= self._heartbeat_at:
            if now - self._heartbeat_at > HEARTBEAT_S:
                self._received_at += now - self._heartbeat_at  # This process was suspended.
            self._heartbeat_at = now + HEARTBEAT_S
            position = self._position()
            self._connection.send({"kind": "heartbeat", "heartbeats": position.heartbeats, "step": position.step})
            if self._stall_timeout_s and now - self._received_at > self._stall_timeout_s:
                self._leave_alone(f"heard nothing from the coordinator for {self._stall_timeout_s:g} s")

    def _handle(self, message: Message) -> None:
        match message:
            case {"kind": "propose", "reason": str(reason), "stops": bool(stops)}:
                self._stops = stops
                self._connection.send({"kind": "answer", "passed": self._stop_point.propose(reason)})
            case {"kind": "decision", "check": int(check)}:
                self._stop_point.decide(check)
            case {"kind": "cut", "generation": int(number)}:
                self._interrupt(number)
            case {"kind": "begin"}:
                self._begin(Generation.from_message(message))
            case {"kind": "dismissed"}:
                with self._changed:
                    self._is_dismissed = True
                    self._changed.notify_all()
            case {"kind": "end", "code": int(code)}:
                self._end(code)
            case {"kind": "restart"}:
                processes.start_again()

    def _interrupt(self, number: int) -> None:
        with self._changed:
            current = self._next or self._generation
            if current is not None and current.number == number:
                self._is_cut = True
                self._stops = False
                self._stop_point.decide(0)  # The main thread must not wait for an agreement.
                if self._cut is None:
                    self._connection.send({"kind": "restart"})
                else:
                    self._cut()
                self._changed.notify_all()

    def _begin(self, generation: Generation) -> None:
        self._stop_point.restart()
        if generation.is_last:
            # At the first check of all members: they save what they have, and end.
            self._stop_point.propose("too few members")
            self._stop_point.decide(1)
        with self._changed:
            self._stops = generation.is_last
            self._is_cut = False
            self._next = generation
            self._changed.notify_all()

    def _handle_signal(self, name: str) -> None:
        now = time.monotonic()
        if self._signalled_at is None:
            self._signalled_at = now
            self._connection.send({"kind": "leave", "reason": f"{name} on host {network.host_name()}"})
        elif now - self._signalled_at > _SAME_SIGNAL_S:
            os._exit(StoppedEarly.exit_code)

    def _leave_alone(self, why: str) -> NoReturn:
        """Ends this process without saving: the others may continue, and only one side may write checkpoints."""
        text = f"hvdtrain: member {self.number} (host {network.host_name()}) {why}; it ends without saving."
        run_with_timeout(_REPORT_S, lambda: write(text))
        os._exit(StoppedEarly.exit_code)

    def _end(self, code: int) -> NoReturn:
        exit_actions = threading.Thread(target=self._exit_actions, daemon=True)
        exit_actions.start()
        exit_actions.join(EXIT_ACTIONS_S)
        os._exit(code)


class ElasticWatch(JobWatch):
    """The job watch of a process of an elastic job: it follows the coordinator instead of watching the other ranks.

    Args:
        endpoint: ``host:port`` of the coordinator.
        token: proves that this process belongs to the job.
        facts: what must be equal in all processes.
        stall_timeout_s: see :class:`JobWatch`.

    Raises:
        DisagreementError: other processes of the job have other facts.
        HvdtrainError: the coordinator cannot be reached.
    """

    def __init__(self, endpoint: tuple[str, int], token: str, facts: Mapping[str, Any], *, stall_timeout_s: float):
        from hvdtrain.distributed.single_process import SingleProcessCollectives  # not above: it imports TensorFlow

        super().__init__(SingleProcessCollectives(), stall_timeout_s=stall_timeout_s)
        self.coordinator = CoordinatorLink(
            endpoint,
            token,
            facts,
            stop_point=self._stop_point,
            position=lambda: self._position,
            exit_actions=self._run_exit_actions,
            stall_timeout_s=stall_timeout_s,
        )

    def start(self) -> None:
        """Starts to follow the coordinator."""
        self._monitor = self.coordinator
        self.coordinator.watch_signals()


def join_elastic_job(facts: Mapping[str, Any], stall_timeout_s: float) -> ElasticWatch:
    """Joins the job that the environment names. Before its first generation, waits for that, and takes a place in it.

    Raises:
        UsageError: the environment names no place to connect to.
        DisagreementError, HvdtrainError: see :class:`ElasticWatch`.
    """
    endpoint, token = environment.elastic_job() or ("", "")
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(f"HVDTRAIN_ELASTIC must be host:port. Received: {endpoint!r}")
    # As in the channel: what cannot be written as JSON is compared as text.
    plain = json.loads(json.dumps(dict(facts), default=str))
    watch = ElasticWatch((host, int(port)), token, plain, stall_timeout_s=stall_timeout_s)
    watch.start()
    environment.note_joined()
    interface = watch.coordinator.interface
    if watch.coordinator.must_warm_up:
        # Whatever has started this process, as Slurm's srun: it is alone until it joins.
        environment.set_place(dataclasses.asdict(Place(0, 1, 0, 1, 0, 1)), interface)
        return watch
    generation = watch.coordinator.next_generation()
    if generation is None:
        raise StoppedEarly("this process was asked to leave before training began.")
    place = dataclasses.asdict(generation.place(watch.coordinator.number))
    environment.set_place(place, interface, (generation.address, generation.port))
    return watch


def _connect(endpoint: tuple[str, int]) -> Connection:
    until = time.monotonic() + _CONNECT_S
    while True:
        try:
            return Connection(socket.create_connection(endpoint, timeout=_CONNECT_S))
        except OSError as error:
            if time.monotonic() > until:
                raise HvdtrainError(
                    f"the coordinator of the job must be reachable over TCP. Received: {endpoint[0]}:{endpoint[1]} "
                    f"({error.strerror or error})."
                ) from None
        time.sleep(0.2)


def _first_messages(connection: Connection, endpoint: tuple[str, int]) -> list[Message]:
    until = time.monotonic() + _WELCOME_S
    with selectors.PollSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        while not connection.is_lost and time.monotonic() < until:
            selector.select(max(0.0, until - time.monotonic()))
            if messages := connection.receive():
                return messages
    raise HvdtrainError(
        f"the coordinator of the job must accept this process. {endpoint[0]}:{endpoint[1]} did not: is it the "
        "coordinator, and is HVDTRAIN_ELASTIC_TOKEN that of the job?"
    )


def _last_traceback() -> str:
    return traceback.format_exc().rstrip()
