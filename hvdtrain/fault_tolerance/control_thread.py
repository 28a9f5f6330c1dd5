"""A thread that communicates for a process while its main thread is busy or stuck, and can end the process."""

import abc
import contextlib
import os
import selectors
import socket
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, NoReturn, TypeVar

from hvdtrain.errors import StoppedEarly
from hvdtrain.fault_tolerance.channel import Connection
from hvdtrain.fault_tolerance.signals import StopSignals, names_in
from hvdtrain.system.background import BackgroundTask, run_with_timeout
from hvdtrain.system.terminal import write

EXIT_ACTIONS_S = 3.0
"""How long exit actions may take."""
REPORT_S = 1.0
"""How long a message may take to write, before the process ends without it."""

# Launchers forward one signal twice in quick succession.
_SAME_SIGNAL_S = 1.0

PeerT = TypeVar("PeerT")


class ControlThread(abc.ABC, Generic[PeerT]):
    """Serves connections, signals and requests of the main thread, for which it never waits; calls no TensorFlow.

    A subclass defines with whom it communicates, and how, by the abstract methods. ``PeerT`` is what it knows of the
    other end of a connection.

    Args:
        name: the name of the thread.
        process_name: this process in messages.
        heartbeat_interval_s: time between two heartbeats.
        exit_actions: called before another process ends this one.
        clock: returns the time in seconds; monotonic.
    """

    def __init__(
        self,
        name: str,
        *,
        process_name: str,
        heartbeat_interval_s: float,
        exit_actions: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._process_name = process_name
        self._heartbeat_interval_s = heartbeat_interval_s
        self._exit_actions = exit_actions
        self._clock = clock
        self._now = self._heartbeat_at = clock()
        self._signals = StopSignals()
        self._signalled_at: float | None = None
        self._requests: deque[Callable[[], None]] = deque()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._selector = selectors.EpollSelector()
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        for end in (self._wake_reader, self._wake_writer):
            end.setblocking(False)
        self._main_thread = threading.get_ident()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    # Called from the main thread.

    def start(self) -> None:
        """Starts the thread; catches signals if the calling thread is Python's main thread."""
        self.catch_signals()
        self._thread.start()
        _running.add(self)

    def catch_signals(self) -> None:
        """Catches signals from now on, if the calling thread is Python's main thread."""
        self._signals.install(self._wake_writer.fileno())

    def close(self, *, ends_process: bool = False, exit_code: int = 0) -> None:
        """Disconnects from the other processes, which then do not report the end of this one as a loss.

        Args:
            ends_process: whether signals are ignored from now on, instead of handled as before.
            exit_code: of this process, if it ends.
        """
        self._signals.restore(ignore=ends_process)
        self._call(lambda: self._say_bye(exit_code))
        self._thread.join()
        self._release()

    def abandon(self) -> None:
        """Closes the connections without a message.

        A forked child does so with its copies: open ones would hide the end of the parent.
        """
        self._signals.restore()
        self._release()

    def _call(self, request: Callable[[], None]) -> None:
        """Calls a function on this thread."""
        if self._thread.is_alive():
            self._requests.append(request)
            with contextlib.suppress(BlockingIOError):  # The thread is awake already.
                self._wake_writer.send(bytes(1))

    def _release(self) -> None:
        _running.discard(self)
        open_ends = [key.fileobj for key in self._selector.get_map().values()]
        self._selector.close()  # Nothing is unregistered: a forked child shares its parent's registrations.
        for end in (*open_ends, self._wake_writer):
            assert isinstance(end, socket.socket | Connection)
            end.close()

    # Called from this thread, from here on.

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            # Other processes would wait for answers of this one forever.
            cause = traceback.format_exc().rstrip()
            text = f"hvdtrain: {self._process_name}: its control thread failed\n{cause}"
            run_with_timeout(REPORT_S, lambda: write(text))
            os._exit(1)

    @property
    def due_at(self) -> float:
        """The latest time at which :meth:`poll` has something to do, by this thread's clock."""
        return self._heartbeat_at

    def poll(self, wait_s: float | None = None) -> None:
        """Receives messages, signals and requests, and handles everything that is due.

        Args:
            wait_s: waits at most this long for any of these (default: as long as it takes).
        """
        until_due_s = max(0.0, self.due_at - self._clock())
        ready = self._ready(until_due_s if wait_s is None else min(wait_s, until_due_s))
        # The clock is read once, before receiving: messages that have arrived by then count against timeouts.
        now = self._clock()
        if now - self._now > 2 * self._heartbeat_interval_s:
            self._extend_deadlines(now - self._now)
        self._now = now
        self._receive_own()
        self._receive(ready)
        if now >= self._heartbeat_at:
            self._heartbeat_at = now + self._heartbeat_interval_s
            self._send_heartbeat()
        self._check_deadlines()

    def _watch(self, connection: Connection, peer: PeerT) -> None:
        """Starts to receive from a connection."""
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def _disconnect(self, connection: Connection) -> None:
        self._selector.unregister(connection)
        connection.close()

    def _ready(self, timeout_s: float) -> list[PeerT]:
        """Waits; returns the peers whose messages can be received."""
        return [key.data for key, _ in self._selector.select(timeout_s) if key.data is not None]

    def _receive_own(self) -> None:
        """Receives signals and the main thread's requests."""
        try:
            written = self._wake_reader.recv(4096)
        except BlockingIOError:
            written = b""
        for name in names_in(written):
            if self._signalled_at is None:
                self._signalled_at = self._now
                self._handle_first_signal(name)
            elif self._now - self._signalled_at > _SAME_SIGNAL_S:
                # It asks for an immediate end, even without exit actions.
                self._handle_second_signal()
                self._exit(StoppedEarly.exit_code)
        while self._requests:
            self._requests.popleft()()

    def _end_process(self, code: int, *, meanwhile: Callable[[], None] = lambda: None) -> NoReturn:
        """Ends this process after the exit actions.

        Args:
            meanwhile: called while they run.
        """
        started = self._clock()
        exit_actions = BackgroundTask(self._exit_actions, "hvdtrain-exit-actions")
        meanwhile()
        exit_actions.wait(max(0.0, started + EXIT_ACTIONS_S - self._clock()))
        self._exit(code)

    def _exit(self, code: int) -> NoReturn:
        os._exit(code)

    # What a subclass defines.

    @abc.abstractmethod
    def _serve(self) -> None:
        """Polls until this process has left or failed."""

    @abc.abstractmethod
    def _receive(self, ready: list[PeerT]) -> None:
        """Receives and handles the messages of these peers."""

    @abc.abstractmethod
    def _send_heartbeat(self) -> None:
        """Sends this process's position, every ``heartbeat_interval_s``."""

    @abc.abstractmethod
    def _check_deadlines(self) -> None:
        """Acts on silent peers, and whatever else is due."""

    @abc.abstractmethod
    def _extend_deadlines(self, gap_s: float) -> None:
        """Extends all deadlines by the time for which this process, and perhaps its host, was suspended."""

    @abc.abstractmethod
    def _handle_first_signal(self, name: str) -> None:
        """Requests a stop because of a signal, such as ``SIGTERM``."""

    def _handle_second_signal(self) -> None:
        """Called before this process ends at once. By default, nothing."""
        return

    @abc.abstractmethod
    def _say_bye(self, exit_code: int) -> None:
        """Sends what the others need to know if this process leaves regularly."""


_running: "weakref.WeakSet[ControlThread[Any]]" = weakref.WeakSet()


def _abandon_in_child() -> None:
    for thread in list(_running):
        thread.abandon()


os.register_at_fork(after_in_child=_abandon_in_child)
