"""The connection of an elastic process to its coordinator: the thread that follows it while the main thread trains."""

import os
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from hvdtrain.errors import StoppedEarly
from hvdtrain.fault_tolerance.channel import Connection, Message
from hvdtrain.fault_tolerance.control_thread import REPORT_S, ControlThread
from hvdtrain.fault_tolerance.elastic.admission import Admission
from hvdtrain.fault_tolerance.elastic.coordinator import HEARTBEAT_S
from hvdtrain.fault_tolerance.elastic.generation import Generation
from hvdtrain.fault_tolerance.stall_detection import Position
from hvdtrain.fault_tolerance.stop_consensus import StopPoint
from hvdtrain.system import network, processes
from hvdtrain.system.background import run_with_timeout
from hvdtrain.system.terminal import write

_DRAIN_S = 1.0
# The coordinator notices a lost process within milliseconds, as this process's reductions do.
_CUT_S = 5.0


class CoordinatorLink(ControlThread[Connection]):
    """This process's control thread: it does what the coordinator decides.

    Args:
        admission: the connection, which the coordinator has accepted.
        stop_point: shared with the main thread.
        position: returns the main thread's latest heartbeat.
        exit_actions: called before the coordinator ends this process.
        stall_timeout_s: ends this process if the coordinator is silent for this long; 0: never.
    """

    def __init__(
        self,
        admission: Admission,
        *,
        stop_point: StopPoint,
        position: Callable[[], Position],
        exit_actions: Callable[[], None],
        stall_timeout_s: float,
    ):
        super().__init__(
            "hvdtrain-member",
            process_name=f"member {admission.member} (host {network.host_name()})",
            heartbeat_interval_s=HEARTBEAT_S,
            exit_actions=exit_actions,
        )
        self._connection = admission.connection
        self._early = admission.early
        self._stop_point = stop_point
        self._position = position
        self._stall_timeout_s = stall_timeout_s
        self._received_at = self._now
        self._watch(self._connection, self._connection)
        self.number = admission.member
        self.must_warm_up = admission.must_warm_up
        """Whether the job trains already, so that this process compiles before it joins."""
        self.start_size = admission.start_size
        """The number of ranks to which ``--batch-size`` applies, whatever their current number."""
        self._changed = threading.Condition()
        self._generation: Generation | None = None
        self._next: Generation | None = None
        self._is_cut = False
        self._is_dismissed = False
        self._stops = False
        self._cut: Callable[[], None] | None = None
        self._has_left = False

    # Called from the main thread.

    def cut_with(self, cut: Callable[[], None]) -> None:
        """Sets the function that makes this process's reductions fail immediately. From now on, ranks may change."""
        with self._changed:
            self._cut = cut
            if self._is_cut:
                cut()

    def restart_all(self) -> NoReturn:
        """Restarts all members, which resume from the last checkpoint."""
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
        """Reports that this process is ready to train."""
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
        self._end_process(0)

    def request_stop(self, reason: str) -> None:
        """Requests that all members save and end, at the same step."""
        self._send({"kind": "stop", "reason": reason})

    def fail(self, code: int) -> None:
        """Ends all members with this exit code."""
        self._send({"kind": "end", "code": code})
        self._thread.join(_DRAIN_S)

    def wait_for_end(self, timeout_s: float) -> None:
        """Returns after a timeout, unless the coordinator ends this process first."""
        self._thread.join(timeout_s)

    def _send(self, message: Message) -> None:
        self._call(lambda: self._connection.send(message))

    # Called from this thread.

    def _serve(self) -> None:
        for message in self._early:
            self._handle(message)
        while not self._has_left:
            self.poll()

    def _receive(self, ready: list[Connection]) -> None:
        for connection in ready:
            for message in connection.receive():
                self._received_at = self._now
                self._handle(message)
        if self._connection.is_lost and not self._has_left and not self._is_dismissed:
            self._leave_alone("lost the connection to the coordinator")

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
                self._end_process(code)
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

    def _handle_first_signal(self, name: str) -> None:
        self._connection.send({"kind": "leave", "reason": f"{name} on host {network.host_name()}"})

    def _send_heartbeat(self) -> None:
        position = self._position()
        self._connection.send({"kind": "heartbeat", "heartbeats": position.heartbeats, "step": position.step})

    def _extend_deadlines(self, gap_s: float) -> None:
        self._received_at += gap_s

    def _check_deadlines(self) -> None:
        if self._stall_timeout_s and self._now - self._received_at > self._stall_timeout_s:
            self._leave_alone(f"received no heartbeat from the coordinator for {self._stall_timeout_s:g} s")

    def _leave_alone(self, why: str) -> NoReturn:
        """Ends this process without saving: the others may continue, and only one side may write checkpoints."""
        text = f"hvdtrain: {self._process_name} {why}; it ends without saving."
        run_with_timeout(REPORT_S, lambda: write(text))
        os._exit(StoppedEarly.exit_code)

    def _say_bye(self, exit_code: int) -> None:
        self._connection.send({"kind": "bye", "code": exit_code})
        self._has_left = True
