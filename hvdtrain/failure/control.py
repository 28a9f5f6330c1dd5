"""The thread that speaks for a rank while its main thread is busy or stuck."""

import contextlib
import os
import selectors
import socket
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import NoReturn

from hvdtrain import process
from hvdtrain.errors import StoppedEarly
from hvdtrain.failure.agreement import StopPoint, StopVote
from hvdtrain.failure.channel import Channel, Connection, Message
from hvdtrain.failure.ending import place, run_for, write
from hvdtrain.failure.position import Position, Standstill, stack_of
from hvdtrain.failure.signals import StopSignals, names_in
from hvdtrain.supervised import note_exit_code

LAST_WORK_S = 3.0
"""How long a process that is about to end may still work."""

# Launchers forward one signal twice in a row.
_SAME_SIGNAL_S = 1.0
_LEAVE_S = 1.0
_TELL_S = 1.0
_AFTER_SPEAKER_S = 0.5
_REMEDY = "The job ends; started again, it goes on from its last checkpoint."


class Peer:
    """The rank at the other end of a connection.

    Args:
        name: for a person.
    """

    def __init__(self, rank: int, name: str, connection: Connection, now: float):
        self.rank = rank
        self.name = name
        self.connection = connection
        self.heard_at = now
        self.position = Position()


class Control:
    """One rank's control thread. It never waits for the main thread and never calls TensorFlow.

    Rank 0 is the hub: it hears all others and judges; the others hear rank 0 alone.

    Args:
        stop_point: shared with the main thread.
        position: says how far the main thread has come.
        last_work: what is to be done before this process ends because of others.
        stall_timeout_s: after how long a rank that is silent, or a job that does not move on, is ended; 0 is never.
    """

    def __init__(
        self,
        rank: int,
        channel: Channel,
        *,
        stop_point: StopPoint,
        position: Callable[[], Position],
        last_work: Callable[[], None],
        stall_timeout_s: float,
    ):
        self._rank = rank
        self._names = {each: place(each, host) for each, host in enumerate(channel.hosts)}
        self._stop_point = stop_point
        self._vote = StopVote(len(channel.hosts))
        self._position = position
        self._last_work = last_work
        self._stall_timeout_s = stall_timeout_s
        self._beat_every_s = min(1.0, stall_timeout_s / 4) if stall_timeout_s else 1.0
        self._now = self._beat_at = time.monotonic()
        self._standstill = Standstill(self._now)
        self._peers = {
            each: Peer(each, self._names[each], connection, self._now)
            for each, connection in channel.connections.items()
        }
        self._signals = StopSignals()
        self._signalled_at: float | None = None
        # SIGTERM ends horovodrun at once, and nobody tells the ranks that mpirun holds for it.
        self._horovodrun = process.horovodrun_above()
        self._requests: deque[Callable[[], None]] = deque()
        self._wake_reader, self._wake_writer = socket.socketpair()
        # poll, not epoll: a forked child shares nothing of it.
        self._selector = selectors.PollSelector()
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        for peer in self._peers.values():
            self._selector.register(peer.connection, selectors.EVENT_READ, peer)
        for end in (self._wake_reader, self._wake_writer):
            end.setblocking(False)
        self._leave_by: float | None = None
        self._has_failed = False
        self._is_ending = False
        self._main_thread = threading.get_ident()
        self._thread = threading.Thread(target=self._run, name="hvdtrain-control", daemon=True)

    # On the main thread.

    def start(self) -> None:
        """Begins to watch the thread that calls this, and to catch signals if that is Python's main thread."""
        self._signals.install(self._wake_writer.fileno())
        self._thread.start()
        _running.add(self)

    def close(self) -> None:
        """Takes leave of the others; from then on the end of this process is no loss."""
        self._signals.restore()
        self._call(self._say_bye)
        self._thread.join()
        self._release()

    def ask_to_stop(self, reason: str) -> None:
        """Has all ranks stop at the same check."""
        self._call(lambda: self._ask_to_stop(reason))

    def fail(self, code: int) -> None:
        """Has all others end with this exit code; returns when they know."""
        self._call(lambda: self._announce_end(code))
        self._thread.join(_LEAVE_S)

    def wait_for_end(self, timeout_s: float) -> None:
        """Returns after a time, unless this thread ends the process first."""
        self._thread.join(timeout_s)
        if self._is_ending:
            self._thread.join()

    def leave_to_parent(self) -> None:
        """In a forked child: lets go of what is the parent's, whose end would be hidden by open connections."""
        self._signals.restore()
        self._release()

    def _call(self, request: Callable[[], None]) -> None:
        if self._thread.is_alive():
            self._requests.append(request)
            with contextlib.suppress(BlockingIOError):  # It is awake already.
                self._wake_writer.send(bytes(1))

    def _release(self) -> None:
        _running.discard(self)
        self._wake_reader.close()
        self._wake_writer.close()
        for peer in self._peers.values():
            peer.connection.close()

    # On the control thread, from here on.

    def _run(self) -> None:
        try:
            while self._leave_by is None:
                self._turn()
            self._see_off(self._leave_by)
        except Exception:
            # Others would wait for an answer of this rank for ever.
            cause = traceback.format_exc().rstrip()
            run_for(_TELL_S, lambda: write(f"hvdtrain: {self._names[self._rank]}: its control thread failed\n{cause}"))
            os._exit(1)

    def _turn(self) -> None:
        until = self._beat_at if self._leave_by is None else min(self._beat_at, self._leave_by)
        ready = self._selector.select(max(0.0, until - time.monotonic()))
        # One reading of the clock, before anything is read: what came in by then is heard before silence is judged.
        now = time.monotonic()
        self._forgive(now - self._now)
        self._now = now
        self._hear_own_process()
        self._hear([key.data for key, _ in ready if key.data is not None])
        self._beat()
        self._judge()

    def _forgive(self, gap_s: float) -> None:
        """Moves all deadlines by a time in which this process, and perhaps its host, stood still."""
        if gap_s > 2 * self._beat_every_s:
            self._standstill.forgive(gap_s)
            for peer in self._peers.values():
                peer.heard_at += gap_s

    def _hear_own_process(self) -> None:
        try:
            written = self._wake_reader.recv(4096)
        except BlockingIOError:
            written = b""
        for name in names_in(written):
            self._hear_signal(name)
        while self._requests:
            self._requests.popleft()()

    def _hear_signal(self, name: str) -> None:
        if self._signalled_at is None:
            self._signalled_at = self._now
            self._ask_to_stop(f"{name} on {self._names[self._rank]}")
        elif self._now - self._signalled_at > _SAME_SIGNAL_S:
            # Whoever sends it again does not want to wait, not even for the last work.
            self._announce_end(StoppedEarly.exit_code)
            note_exit_code(StoppedEarly.exit_code)
            os._exit(StoppedEarly.exit_code)

    def _hear(self, ready: Iterable[Peer]) -> None:
        for peer in ready:
            for message in peer.connection.receive():
                peer.heard_at = self._now
                if peer.rank in self._peers:
                    self._handle(peer, message)
        # Only now: a rank that has said why it ends may be heard of later than others that end because of it.
        for peer in list(self._peers.values()):
            if peer.connection.is_lost:
                self._drop(peer)
                if self._leave_by is None:
                    # Its last word may be a second old; this rank has come about as far.
                    last = max(peer.position, self._position(), key=lambda position: position.beats)
                    self._end_for(f"{peer.name} is gone {last.at_step} (killed, or its host was lost).")

    def _handle(self, peer: Peer, message: Message) -> None:
        match message:
            case {"kind": "bye", "passed": passed}:
                self._drop(peer)
                self._standstill.moved(self._now)
                if self._rank == 0:
                    self._count(peer.rank, passed)
                else:
                    self._stop_point.withdraw()
            case {"kind": "end", "code": code}:
                if self._has_failed:
                    self._drop(peer)
                else:
                    self._end(code)
            case _ if self._leave_by is not None:
                pass  # Nothing else matters to a rank that leaves.
            case {"kind": "beat", "position": position}:
                self._note(peer, Position(*position))
            case {"kind": "stop", "reason": reason}:
                self._propose(reason)
            case {"kind": "propose", "reason": reason}:
                peer.connection.send({"kind": "answer", "passed": self._stop_point.propose(reason)})
            case {"kind": "answer", "passed": passed}:
                self._count(peer.rank, passed)
            case {"kind": "decision", "check": check}:
                self._stop_point.decide(check)
            case {"kind": "where"}:
                stack = stack_of(self._main_thread)
                peer.connection.send({"kind": "here", "position": self._position(), "stack": stack})
            case {"kind": "here", "position": position, "stack": stack}:
                self._note(peer, Position(*position))
                self._standstill.answer(peer.rank, peer.position, stack)

    def _note(self, peer: Peer, position: Position) -> None:
        peer.position = position
        self._standstill.note(peer.rank, position, self._now)

    def _send_all(self, message: Message) -> None:
        for peer in self._peers.values():
            peer.connection.send(message)

    def _drop(self, peer: Peer) -> None:
        self._selector.unregister(peer.connection)
        peer.connection.close()
        del self._peers[peer.rank]

    # Stopping at one point.

    def _ask_to_stop(self, reason: str) -> None:
        if self._rank == 0:
            self._propose(reason)
        else:
            self._send_all({"kind": "stop", "reason": reason})

    def _propose(self, reason: str) -> None:
        if self._leave_by is None and self._vote.open():
            self._send_all({"kind": "propose", "reason": reason})
            self._count(0, self._stop_point.propose(reason))

    def _count(self, rank: int, passed: int) -> None:
        self._vote.record(rank, passed)
        decision = self._vote.decision()
        if decision is not None:
            self._send_all({"kind": "decision", "check": decision})
            self._stop_point.decide(decision)

    # Being alive.

    def _beat(self) -> None:
        if self._now < self._beat_at:
            return
        self._beat_at = self._now + self._beat_every_s
        if self._horovodrun is not None and not process.is_running(self._horovodrun):
            self._horovodrun = None
            self._ask_to_stop(f"the end of horovodrun, noticed by {self._names[self._rank]}")
        for peer in self._peers.values():
            if peer.connection.is_backed_up:
                peer.connection.flush()  # Nothing is gained by piling up more.
            else:
                peer.connection.send({"kind": "beat", "position": self._position()})

    def _judge(self) -> None:
        if not self._stall_timeout_s or self._leave_by is not None:
            return
        for peer in self._peers.values():
            if self._now - peer.heard_at > self._stall_timeout_s:
                text = f"{peer.name} has been silent for {self._stall_timeout_s:g} s, last heard of {peer.position}."
                # Each rank notices it by itself, up to a beat later than another.
                self._end_for(text, after_s=2 * self._beat_every_s)
        if self._rank == 0:
            self._judge_standstill()

    def _judge_standstill(self) -> None:
        own = self._position()
        self._standstill.note(0, own, self._now)
        if self._standstill.lasts_s(self._now) <= self._stall_timeout_s:
            return
        if any(self._now - peer.heard_at > 2 * self._beat_every_s for peer in self._peers.values()):
            return  # A rank is stopped or cut off: soon it is known which.
        if not self._standstill.is_asked:
            self._standstill.is_asked = True
            self._standstill.answer(0, own, stack_of(self._main_thread))
            self._send_all({"kind": "where"})
        elif self._standstill.num_answers > len(self._peers):
            culprits = ", ".join(self._names[rank] for rank in self._standstill.culprits())
            who = f"; the others wait for {culprits}" if culprits else ""
            text = f"no rank has moved on for {self._stall_timeout_s:g} s{who}."
            self._end_for(text, details="\n" + self._standstill.told(self._names))

    # The end.

    def _say_bye(self) -> None:
        self._send_all({"kind": "bye", "passed": self._stop_point.withdraw()})
        self._leave_by = self._now + _LEAVE_S

    def _announce_end(self, code: int) -> None:
        self._send_all({"kind": "end", "code": code})
        self._leave_by = self._now + _LEAVE_S
        self._has_failed = True

    def _see_off(self, until: float) -> None:
        """Waits until the others have let go of their connections, hence have read all that was sent."""
        while self._peers and time.monotonic() < until:
            self._turn()

    def _end_for(self, text: str, *, details: str = "", after_s: float = 0.0) -> NoReturn:
        """Ends the job for a reason that rank 0 tells, or rank 1 where rank 0 is lost."""
        if self._rank <= 1:
            run_for(_TELL_S, lambda: write(f"hvdtrain: {text} {_REMEDY}{details}"))
            self._end(1)
        self._end(1, after_s=_AFTER_SPEAKER_S + after_s)

    def _end(self, code: int, *, after_s: float = 0.0) -> NoReturn:
        """Ends this process because of others."""
        self._is_ending = True
        last_work = threading.Thread(target=self._last_work, daemon=True)
        last_work.start()
        started = time.monotonic()
        self._announce_end(code)
        self._see_off(started + _LEAVE_S)
        time.sleep(max(0.0, started + after_s - time.monotonic()))
        last_work.join(max(0.0, started + LAST_WORK_S - time.monotonic()))
        note_exit_code(code)
        os._exit(code)


_running: "weakref.WeakSet[Control]" = weakref.WeakSet()


def _leave_to_parent() -> None:
    for control in list(_running):
        control.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)
