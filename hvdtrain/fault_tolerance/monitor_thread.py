"""The thread that communicates for a rank while its main thread is busy or stuck."""

import contextlib
import os
import selectors
import socket
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import NoReturn

from hvdtrain.errors import StoppedEarly
from hvdtrain.fault_tolerance.channel import Channel, Message, line_of
from hvdtrain.fault_tolerance.peers import Peer, heartbeat_interval_s, loss_of
from hvdtrain.fault_tolerance.signals import StopSignals, names_in
from hvdtrain.fault_tolerance.stall_detection import Position, StallDetector, stack_of
from hvdtrain.fault_tolerance.stop_consensus import StopPoint, StopVote
from hvdtrain.system import processes
from hvdtrain.system.background import run_with_timeout
from hvdtrain.system.supervisor_client import note_exit_code
from hvdtrain.system.terminal import rank_name, some_of, write

EXIT_ACTIONS_S = 3.0
"""How long exit actions may take."""

# Launchers forward one signal twice in quick succession.
_SAME_SIGNAL_S = 1.0
_DRAIN_S = 1.0
_REPORT_S = 1.0
_AFTER_REPORT_S = 0.5
# Rank 0 of a job with more ranks than that lets messages gather: each wake-up interrupts its main thread.
_MANY_RANKS = 32
_GATHER_S = 0.2
_CHECK_LAUNCHER_S = 1.0
_REMEDY = "The job ends; restart it to resume from its last checkpoint."


class MonitorThread:
    """One rank's monitor thread. It never waits for the main thread and never calls TensorFlow.

    Rank 0 is the hub: it is connected to all other ranks and detects stalls; they are connected to rank 0 only.

    Args:
        stop_point: shared with the main thread.
        position: returns the main thread's latest heartbeat.
        exit_actions: called before another rank ends this process.
        stall_timeout_s: ends the job if no heartbeat of a rank arrives, or no rank makes progress, for this long;
            0: never.
        clock: returns the time in seconds; monotonic.
    """

    def __init__(
        self,
        rank: int,
        channel: Channel,
        *,
        stop_point: StopPoint,
        position: Callable[[], Position],
        exit_actions: Callable[[], None],
        stall_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._rank = rank
        self._hosts = channel.hosts
        self._stop_point = stop_point
        self._vote = StopVote(len(channel.hosts))
        self._position = position
        self._exit_actions = exit_actions
        self._stall_timeout_s = stall_timeout_s
        self._clock = clock
        self._heartbeat_interval_s = heartbeat_interval_s(len(channel.hosts), stall_timeout_s)
        self._now = self._heartbeat_at = self._check_launcher_at = self._check_peers_at = clock()
        self._stall = StallDetector(self._now)
        self._peers = {
            each: Peer(each, self._name(each), connection, self._now)
            for each, connection in channel.connections.items()
        }
        self._signals = StopSignals()
        self._signalled_at: float | None = None
        # SIGTERM ends horovodrun at once, and the ranks that mpirun starts for it are not notified.
        self._horovodrun = processes.horovodrun_above()
        self._requests: deque[Callable[[], None]] = deque()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._selector = selectors.EpollSelector()
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        for peer in self._peers.values():
            self._selector.register(peer.connection, selectors.EVENT_READ, peer)
        for end in (self._wake_reader, self._wake_writer):
            end.setblocking(False)
        self._drain_until: float | None = None
        self._has_failed = False
        self._is_ending = False
        self._main_thread = threading.get_ident()
        self._thread = threading.Thread(target=self._run, name="hvdtrain-monitor", daemon=True)

    # Called from the main thread.

    def start(self) -> None:
        """Starts monitoring the calling thread; catches signals if it is Python's main thread."""
        self._signals.install(self._wake_writer.fileno())
        self._thread.start()
        _running.add(self)

    def close(self, *, ends_process: bool = False) -> None:
        """Disconnects from the other ranks, which then do not report the end of this process as a loss."""
        self._signals.restore(ignore=ends_process)
        self._call(self._send_bye)
        self._thread.join()
        self._release()

    def request_stop(self, reason: str) -> None:
        """Requests that all ranks stop at the same check."""
        self._call(lambda: self._request_stop(reason))

    def fail(self, code: int) -> None:
        """Ends all other ranks with this exit code; returns when they have received it."""
        self._call(lambda: self._announce_end(code))
        self._thread.join(_DRAIN_S)

    def wait_for_end(self, timeout_s: float) -> None:
        """Returns after a timeout, unless this thread ends the process first."""
        self._thread.join(timeout_s)
        if self._is_ending:
            self._thread.join()

    def release_in_child(self) -> None:
        """Closes a forked child's copies of the connections: open ones would hide the end of the parent."""
        self._signals.restore()
        self._release()

    def _call(self, request: Callable[[], None]) -> None:
        if self._thread.is_alive():
            self._requests.append(request)
            with contextlib.suppress(BlockingIOError):  # It is awake already.
                self._wake_writer.send(bytes(1))

    def _release(self) -> None:
        _running.discard(self)
        self._selector.close()  # Nothing is unregistered: a forked child shares its parent's registrations.
        self._wake_reader.close()
        self._wake_writer.close()
        for peer in self._peers.values():
            peer.connection.close()

    # Called from the monitor thread, from here on.

    def _run(self) -> None:
        try:
            while self._drain_until is None:
                self.poll()
                self._let_messages_gather()
            self._drain(self._drain_until)
        except Exception:
            # Other ranks would wait for this rank's answers forever.
            cause = traceback.format_exc().rstrip()
            run_with_timeout(
                _REPORT_S, lambda: write(f"hvdtrain: {self._name(self._rank)}: its monitor thread failed\n{cause}")
            )
            os._exit(1)

    def poll(self) -> None:
        """Waits for messages or the next deadline; then receives, sends a heartbeat if due, and detects stalls."""
        until = min(self._heartbeat_at, self._check_launcher_at)
        until = until if self._drain_until is None else min(until, self._drain_until)
        ready = self._ready(max(0.0, until - self._clock()))
        # The clock is read once, before receiving: messages that have arrived by then count against timeouts.
        now = self._clock()
        self._extend_deadlines(now - self._now)
        self._now = now
        self._receive_own()
        lost = self._receive(ready)
        if lost and self._drain_until is None:
            self._end_for_lost(lost)
        self._check_launcher()
        self._send_heartbeat()
        self._check_timeouts()

    def _ready(self, timeout_s: float) -> list[Peer]:
        return [key.data for key, _ in self._selector.select(timeout_s) if key.data is not None]

    def _let_messages_gather(self) -> None:
        if len(self._peers) > _MANY_RANKS:
            time.sleep(_GATHER_S)

    def _extend_deadlines(self, gap_s: float) -> None:
        """Extends all deadlines by a time in which this process, and perhaps its host, was suspended."""
        if gap_s > 2 * self._heartbeat_interval_s:
            self._stall.extend(gap_s)
            for peer in self._peers.values():
                peer.received_at += gap_s

    def _receive_own(self) -> None:
        """Receives signals and the main thread's requests."""
        try:
            written = self._wake_reader.recv(4096)
        except BlockingIOError:
            written = b""
        for name in names_in(written):
            self._handle_signal(name)
        while self._requests:
            self._requests.popleft()()

    def _handle_signal(self, name: str) -> None:
        if self._signalled_at is None:
            self._signalled_at = self._now
            self._request_stop(f"{name} on {self._name(self._rank)}")
        elif self._now - self._signalled_at > _SAME_SIGNAL_S:
            # A second signal asks for an immediate end, even without exit actions.
            self._announce_end(StoppedEarly.exit_code)
            note_exit_code(StoppedEarly.exit_code)
            os._exit(StoppedEarly.exit_code)

    def _receive(self, ready: Sequence[Peer]) -> list[Peer]:
        """Handles what these ranks have sent; returns those that are lost."""
        for peer in ready:
            for message in peer.connection.receive():
                peer.received_at = self._now
                if peer.rank in self._peers:
                    self._handle(peer, message)
        # Only now: the message of a rank that reports why it ends may be read after the loss of ranks that it ended.
        lost = [peer for peer in ready if peer.connection.is_lost and peer.rank in self._peers]
        for peer in lost:
            self._drop(peer)
        return lost

    def _end_for_lost(self, lost: Sequence[Peer]) -> NoReturn:
        self._let_messages_gather()  # The ranks of a host are lost together.
        self._end_for(loss_of([*lost, *self._receive(self._ready(0.0))], self._position()))

    def _handle(self, peer: Peer, message: Message) -> None:
        match message:
            case {"kind": "bye", "passed": passed}:
                self._drop(peer)
                self._stall.reset(self._now)
                if self._rank == 0:
                    self._record_vote(peer.rank, passed)
                else:
                    self._stop_point.withdraw()
            case {"kind": "end", "code": code}:
                if self._has_failed:
                    self._drop(peer)
                else:
                    self._end(code)
            case _ if self._drain_until is not None:
                pass  # A rank that leaves ignores all other messages.
            case {"kind": "heartbeat", "position": position}:
                self._update(peer, Position(*position))
            case {"kind": "stop", "reason": reason}:
                self._propose(reason)
            case {"kind": "propose", "reason": reason}:
                peer.connection.send({"kind": "answer", "passed": self._stop_point.propose(reason)})
            case {"kind": "answer", "passed": passed}:
                self._record_vote(peer.rank, passed)
            case {"kind": "decision", "check": check}:
                self._stop_point.decide(check)
            case {"kind": "send stack"}:
                stack = stack_of(self._main_thread)
                peer.connection.send({"kind": "stack", "position": self._position(), "stack": stack})
            case {"kind": "stack", "position": position, "stack": stack}:
                self._update(peer, Position(*position))
                self._stall.add_stack(peer.rank, peer.position, stack)

    def _name(self, rank: int) -> str:
        return rank_name(rank, self._hosts[rank])

    def _update(self, peer: Peer, position: Position) -> None:
        peer.position = position
        self._stall.update(peer.rank, position, self._now)

    def _send_all(self, message: Message) -> None:
        line = line_of(message)
        for peer in self._peers.values():
            peer.connection.send_line(line)

    def _drop(self, peer: Peer) -> None:
        self._selector.unregister(peer.connection)
        peer.connection.close()
        del self._peers[peer.rank]

    # Stop consensus.

    def _request_stop(self, reason: str) -> None:
        if self._rank == 0:
            self._propose(reason)
        else:
            self._send_all({"kind": "stop", "reason": reason})

    def _propose(self, reason: str) -> None:
        if self._drain_until is None and self._vote.open():
            self._send_all({"kind": "propose", "reason": reason})
            self._record_vote(0, self._stop_point.propose(reason))

    def _record_vote(self, rank: int, passed: int) -> None:
        self._vote.record(rank, passed)
        decision = self._vote.decision()
        if decision is not None:
            self._send_all({"kind": "decision", "check": decision})
            self._stop_point.decide(decision)

    # Heartbeats and timeouts.

    def _check_launcher(self) -> None:
        if self._now < self._check_launcher_at:
            return
        self._check_launcher_at = self._now + _CHECK_LAUNCHER_S
        if self._horovodrun is not None and not processes.is_running(self._horovodrun):
            self._horovodrun = None
            self._request_stop(f"horovodrun ended, detected by {self._name(self._rank)}")

    def _send_heartbeat(self) -> None:
        if self._now < self._heartbeat_at:
            return
        self._heartbeat_at = self._now + self._heartbeat_interval_s
        line = line_of({"kind": "heartbeat", "position": self._position()})
        for peer in self._peers.values():
            if peer.connection.is_backed_up:
                peer.connection.flush()  # More heartbeats would only queue up.
            else:
                peer.connection.send_line(line)

    def _check_timeouts(self) -> None:
        if not self._stall_timeout_s or self._drain_until is not None:
            return
        if self._now >= self._check_peers_at:
            # Not at each of many messages: this looks at all ranks.
            self._check_peers_at = self._now + self._heartbeat_interval_s / 4
            for peer in self._peers.values():
                if self._now - peer.received_at > self._stall_timeout_s:
                    text = f"no heartbeat from {peer.name} for {self._stall_timeout_s:g} s, last seen {peer.position}."
                    # Each rank detects it on its own, up to one heartbeat interval after another rank.
                    self._end_for(text, after_s=2 * self._heartbeat_interval_s)
        if self._rank == 0:
            self._check_stall()

    def _check_stall(self) -> None:
        own = self._position()
        self._stall.update(0, own, self._now)
        if self._stall.stalled_s(self._now) <= self._stall_timeout_s:
            return
        if any(self._now - peer.received_at > 2 * self._heartbeat_interval_s for peer in self._peers.values()):
            return  # A rank is stopped or disconnected: its own timeout will name it.
        if not self._stall.stacks_requested:
            self._stall.stacks_requested = True
            self._stall.add_stack(0, own, stack_of(self._main_thread))
            self._send_all({"kind": "send stack"})
        elif self._stall.num_stacks > len(self._peers):
            behind = some_of([self._name(rank) for rank in self._stall.ranks_behind()])
            waiting = f"; the others wait for {behind}" if behind else ""
            text = f"no rank made progress for {self._stall_timeout_s:g} s{waiting}."
            self._end_for(text, details="\n" + self._stall.report(self._name))

    # The end.

    def _send_bye(self) -> None:
        self._send_all({"kind": "bye", "passed": self._stop_point.withdraw()})
        self._drain_until = self._now + _DRAIN_S

    def _announce_end(self, code: int) -> None:
        self._send_all({"kind": "end", "code": code})
        self._drain_until = self._now + _DRAIN_S
        self._has_failed = True

    def _drain(self, until: float) -> None:
        """Waits until the other ranks have closed their connections, and so have received all that was sent."""
        while self._peers and self._clock() < until:
            self.poll()

    def _end_for(self, text: str, *, details: str = "", after_s: float = 0.0) -> NoReturn:
        """Ends the job for a reason that rank 0 reports, or rank 1 if rank 0 is lost."""
        if self._rank <= 1:
            run_with_timeout(_REPORT_S, lambda: write(f"hvdtrain: {text} {_REMEDY}{details}"))
            self._end(1)
        self._end(1, after_s=_AFTER_REPORT_S + after_s)

    def _end(self, code: int, *, after_s: float = 0.0) -> NoReturn:
        """Ends this process because of another rank."""
        self._is_ending = True
        exit_actions = threading.Thread(target=self._exit_actions, daemon=True)
        exit_actions.start()
        started = self._clock()
        self._announce_end(code)
        self._drain(started + _DRAIN_S)
        time.sleep(max(0.0, started + after_s - self._clock()))
        exit_actions.join(max(0.0, started + EXIT_ACTIONS_S - self._clock()))
        note_exit_code(code)
        os._exit(code)


_running: "weakref.WeakSet[MonitorThread]" = weakref.WeakSet()


def _release_in_child() -> None:
    for monitor in list(_running):
        monitor.release_in_child()


os.register_at_fork(after_in_child=_release_in_child)
