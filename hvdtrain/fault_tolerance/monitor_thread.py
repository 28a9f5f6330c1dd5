"""The thread that communicates with the other ranks, detects their loss, and ends this rank with them."""

import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from hvdtrain.errors import StoppedEarly
from hvdtrain.fault_tolerance.channel import Channel, Message
from hvdtrain.fault_tolerance.control_thread import REPORT_S, ControlThread
from hvdtrain.fault_tolerance.peers import (
    Peer,
    gather_time_s,
    heartbeat_interval_s,
    loss_of,
    send_all,
    send_heartbeats,
)
from hvdtrain.fault_tolerance.rank_timeouts import Failure, RankTimeouts
from hvdtrain.fault_tolerance.stall_detection import Position, stack_of
from hvdtrain.fault_tolerance.stop_consensus import StopConsensus, StopPoint
from hvdtrain.system import processes
from hvdtrain.system.background import run_with_timeout
from hvdtrain.system.supervisor_client import note_exit_code
from hvdtrain.system.terminal import rank_name, write

_DRAIN_S = 1.0
_AFTER_REPORT_S = 0.5
_CHECK_LAUNCHER_S = 1.0
_REMEDY = "The job ends; restart it to resume from its last checkpoint."


class MonitorThread(ControlThread[Peer]):
    """One rank's control thread.

    Rank 0 is the hub: it is connected to all other ranks and detects stalls; they are connected to rank 0 only.

    Args:
        stop_point: shared with the main thread.
        position: returns the main thread's latest heartbeat.
        exit_actions: called before another rank ends this process.
        stall_timeout_s: ends the job if a rank sends no heartbeat, or no rank makes progress, for this long; 0: never.
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
        size = len(channel.hosts)
        names = [rank_name(each, host) for each, host in enumerate(channel.hosts)]
        interval_s = heartbeat_interval_s(size, stall_timeout_s)
        super().__init__(
            "hvdtrain-monitor",
            process_name=names[rank],
            heartbeat_interval_s=interval_s,
            exit_actions=exit_actions,
            clock=clock,
        )
        self._rank = rank
        self._stop_point = stop_point
        self._position = position
        self._check_launcher_at = self._now
        self.peers = {
            each: Peer(each, names[each], connection, self._now) for each, connection in channel.connections.items()
        }
        """The connected ranks."""
        for peer in self.peers.values():
            self._watch(peer.connection, peer)
        self._consensus = StopConsensus(rank, size, stop_point=stop_point, send_all=self._send_all)
        self._timeouts = RankTimeouts(
            rank,
            self.peers,
            names=names,
            position=position,
            main_thread=self._main_thread,
            stall_timeout_s=stall_timeout_s,
            heartbeat_interval_s=interval_s,
            now=self._now,
        )
        # SIGTERM ends horovodrun at once, and the ranks that mpirun starts for it are not notified.
        self._horovodrun = processes.horovodrun_above()
        self._drain_until: float | None = None
        self._has_failed = False
        self._is_ending = False

    # Called from the main thread.

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

    # Called from the monitor thread, from here on.

    def _serve(self) -> None:
        while self._drain_until is None:
            self.poll()
            self._let_messages_gather()
        self._drain(self._drain_until)

    @property
    def due_at(self) -> float:
        due_at = min(super().due_at, self._check_launcher_at)
        return due_at if self._drain_until is None else min(due_at, self._drain_until)

    def _let_messages_gather(self) -> None:
        time.sleep(gather_time_s(len(self.peers)))

    def _request_stop(self, reason: str) -> None:
        if self._drain_until is None:
            self._consensus.request(reason)

    def _handle_first_signal(self, name: str) -> None:
        self._request_stop(f"{name} on {self._process_name}")

    def _handle_second_signal(self) -> None:
        self._announce_end(StoppedEarly.exit_code)

    # Messages.

    def _receive(self, ready: list[Peer]) -> None:
        lost = self._receive_from(ready)
        if lost and self._drain_until is None:
            self._let_messages_gather()  # The ranks of a host are lost together.
            lost += self._receive_from(self._ready(0.0))
            self._end_for(Failure(loss_of(lost, self._position())))

    def _receive_from(self, ready: Sequence[Peer]) -> list[Peer]:
        """Handles the messages of these ranks; returns the ranks that are lost."""
        for peer in ready:
            for message in peer.connection.receive():
                peer.received_at = self._now
                if peer.rank in self.peers:
                    self._handle(peer, message)
        # Only now: the message of a rank that reports why it ends may be read after the loss of ranks that it ended.
        lost = [peer for peer in ready if peer.connection.is_lost and peer.rank in self.peers]
        for peer in lost:
            self._drop(peer)
        return lost

    def _handle(self, peer: Peer, message: Message) -> None:
        match message:
            case {"kind": "bye", "passed": passed}:
                self._drop(peer)
                self._timeouts.reset_stall(self._now)
                self._consensus.note_left(peer.rank, passed)
            case {"kind": "end", "code": code}:
                if self._has_failed:
                    self._drop(peer)
                else:
                    self._end(code)
            case _ if self._drain_until is not None:
                pass  # A rank that leaves ignores all other messages.
            case {"kind": "heartbeat", "position": position}:
                self._timeouts.update(peer, Position(*position), self._now)
            case {"kind": "send stack"}:
                stack = stack_of(self._main_thread)
                peer.connection.send({"kind": "stack", "position": self._position(), "stack": stack})
            case {"kind": "stack", "position": position, "stack": stack}:
                self._timeouts.update(peer, Position(*position), self._now)
                self._timeouts.add_stack(peer, stack)
            case _:
                self._consensus.handle(peer.rank, message)

    def _send_all(self, message: Message) -> None:
        send_all(self.peers.values(), message)

    def _drop(self, peer: Peer) -> None:
        self._disconnect(peer.connection)
        del self.peers[peer.rank]

    # Heartbeats and deadlines.

    def _send_heartbeat(self) -> None:
        send_heartbeats(self.peers.values(), self._position())

    def _extend_deadlines(self, gap_s: float) -> None:
        self._timeouts.extend(gap_s)

    def _check_deadlines(self) -> None:
        self._check_launcher()
        if self._drain_until is None and (failure := self._timeouts.failure(self._now)) is not None:
            self._end_for(failure)

    def _check_launcher(self) -> None:
        if self._now < self._check_launcher_at:
            return
        self._check_launcher_at = self._now + _CHECK_LAUNCHER_S
        if self._horovodrun is not None and not processes.is_running(self._horovodrun):
            self._horovodrun = None
            self._request_stop(f"horovodrun ended, detected by {self._process_name}")

    # The end.

    def _say_bye(self, exit_code: int) -> None:
        self._send_all({"kind": "bye", "passed": self._stop_point.withdraw()})
        self._drain_until = self._now + _DRAIN_S

    def _announce_end(self, code: int) -> None:
        self._send_all({"kind": "end", "code": code})
        self._drain_until = self._now + _DRAIN_S
        self._has_failed = True

    def _drain(self, until: float) -> None:
        """Waits until the other ranks have closed their connections, and so have received all that was sent."""
        while self.peers and self._clock() < until:
            self.poll()

    def _end_for(self, failure: Failure) -> NoReturn:
        """Ends the job for a reason that rank 0 reports, or rank 1 if rank 0 is lost."""
        if self._rank <= 1:
            text = f"hvdtrain: {failure.text} {_REMEDY}{failure.details}"
            run_with_timeout(REPORT_S, lambda: write(text))
            self._end(1)
        self._end(1, after_s=_AFTER_REPORT_S + failure.after_s)

    def _end(self, code: int, *, after_s: float = 0.0) -> NoReturn:
        """Ends this process because of another rank.

        Args:
            after_s: the earliest time from now.
        """
        self._is_ending = True
        started = self._clock()

        def end_others() -> None:
            self._announce_end(code)
            self._drain(started + _DRAIN_S)
            time.sleep(max(0.0, started + after_s - self._clock()))

        self._end_process(code, meanwhile=end_others)

    def _exit(self, code: int) -> NoReturn:
        note_exit_code(code)
        super()._exit(code)
