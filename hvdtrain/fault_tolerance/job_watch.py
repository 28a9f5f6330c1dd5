"""Handles signals, lost ranks and stalls of a job, independently of MPI and Horovod."""

import contextlib
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from hvdtrain.errors import UsageError
from hvdtrain.fault_tolerance.channel import open_channel
from hvdtrain.fault_tolerance.control_thread import EXIT_ACTIONS_S
from hvdtrain.fault_tolerance.monitor_thread import MonitorThread
from hvdtrain.fault_tolerance.stall_detection import Position
from hvdtrain.fault_tolerance.stop_consensus import StopPoint
from hvdtrain.system import transfers
from hvdtrain.system.background import run_with_timeout

if TYPE_CHECKING:
    from hvdtrain.distributed.collectives import Collectives


class Monitor(Protocol):
    """What a job watch needs of its thread."""

    def close(self, *, ends_process: bool = False, exit_code: int = 0) -> None: ...
    def request_stop(self, reason: str) -> None: ...
    def fail(self, code: int) -> None: ...
    def wait_for_end(self, timeout_s: float) -> None: ...


class JobWatch:
    """The main thread's interface to the monitor threads of all ranks.

    A rank that is killed, stopped or disconnected ends the job, within seconds or after a timeout, with one
    line that names the rank and the step. SIGTERM and SIGINT request a stop: all ranks stop at the same
    :meth:`check`. While a job watch is open:

    - all ranks must pass the same checks in the same order;
    - errors must end the job through :func:`hvdtrain.fault_tolerance.shutdown.end_job`, within the ``with`` block.

    Args:
        collectives: used to exchange addresses (default: those of ``hvdtrain.init()``).
        stall_timeout_s: ends the job if a rank sends no heartbeat, or no rank makes progress, for this long; 0: never.
        clock: returns the time in seconds; monotonic.
    """

    def __init__(
        self,
        collectives: "Collectives | None" = None,
        *,
        stall_timeout_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        if stall_timeout_s < 0:
            raise UsageError(f"stall_timeout_s must be at least 0; 0 means never. Received: {stall_timeout_s}")
        self._collectives = collectives
        self._stall_timeout_s = stall_timeout_s
        self._clock = clock
        self._stop_point = StopPoint()
        self._position = Position()
        self._exit_actions: list[Callable[[], None]] = []
        self.monitor: Monitor | None = None
        """The thread that communicates for this process; None while the watch is not open."""

    def start(self) -> None:
        """Connects the ranks. Collective: all ranks must call it.

        Catches signals if the calling thread is Python's main thread.

        Raises:
            JobError: on all ranks, if one cannot connect to rank 0.
        """
        collectives = self._collectives
        if collectives is None:
            from hvdtrain.distributed import runtime  # It takes seconds to import, and unit tests do not need it.

            collectives = runtime.current().collectives
        monitor = MonitorThread(
            collectives.rank,
            open_channel(collectives),
            stop_point=self._stop_point,
            position=lambda: self._position._replace(transfers=transfers.count()),
            exit_actions=self._run_exit_actions,
            stall_timeout_s=self._stall_timeout_s,
            clock=self._clock,
        )
        monitor.start()
        self.monitor = monitor

    def close(self, *, ends_process: bool = False, exit_code: int = 0) -> None:
        """Disconnects from the other ranks and restores signal handlers. Call it from the thread that called start.

        Not a collective: other ranks may continue, and do not report this rank as lost.

        Args:
            ends_process: ignore signals from now on instead: this process ends with an exit code that is decided.
            exit_code: this one, which becomes that of an elastic job.
        """
        if self.monitor is not None:
            self.monitor.close(ends_process=ends_process, exit_code=exit_code)
            self.monitor = None

    def __enter__(self) -> "JobWatch":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def check(self) -> bool:
        """Passes a point that all ranks pass in the same order; returns True if all ranks stop at this one."""
        return self._stop_point.check()

    @property
    def stop_requested(self) -> bool:
        """True once this rank knows that a stop was requested; other ranks may learn of it later."""
        return self._stop_point.is_requested

    @property
    def is_cut(self) -> bool:
        """True once a rank of an elastic job was lost: these ranks complete nothing together any more."""
        return self._stop_point.decision == 0

    @property
    def stop_reason(self) -> str | None:
        """What requested the stop: ``SIGTERM on rank 1 (host b)``."""
        return self._stop_point.reason

    def request_stop(self, reason: str) -> None:
        """Requests that all ranks stop, as a signal does."""
        if self.monitor is not None:
            self.monitor.request_stop(reason)

    def heartbeat(self, where: str, step: int) -> None:
        """Reports progress of the main thread. All ranks must call it at the same points of the run."""
        self._position = Position(self._position.heartbeats + 1, where, step)

    def before_exit(self, action: Callable[[], None]) -> None:
        """Registers an action to run on another thread, for at most 3 s, before another rank ends this process."""
        self._exit_actions.append(action)

    def run_exit_actions(self) -> None:
        """Runs the actions registered by :meth:`before_exit`, for at most 3 s."""
        run_with_timeout(EXIT_ACTIONS_S, self._run_exit_actions)

    def fail(self, code: int) -> None:
        """Ends all other ranks with this exit code at once; call it after reporting the cause."""
        if self.monitor is not None:
            self.monitor.fail(code)
        self.run_exit_actions()

    def wait_for_cause(self, timeout_s: float) -> None:
        """Waits for another rank to report why the job ends, which also ends this process."""
        if self.monitor is not None:
            self.monitor.wait_for_end(timeout_s)

    def _run_exit_actions(self) -> None:
        for action in self._exit_actions:
            with contextlib.suppress(Exception):  # The process ends either way, with a cause that matters more.
                action()
