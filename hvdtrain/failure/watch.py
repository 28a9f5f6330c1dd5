"""The ranks of a job watch over each other, apart from MPI and Horovod."""

import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from hvdtrain.errors import UsageError
from hvdtrain.failure.agreement import StopPoint
from hvdtrain.failure.channel import open_channel
from hvdtrain.failure.control import LAST_WORK_S, Control
from hvdtrain.failure.ending import run_for
from hvdtrain.failure.position import Position

if TYPE_CHECKING:
    from hvdtrain.collectives import Collectives


class JobWatch:
    """What the main thread says to, and hears from, the control threads of all ranks.

    A rank that is killed, stopped or cut off ends the job within seconds or after a timeout, with one
    line that says which and where. SIGTERM and SIGINT ask the job to stop, which all ranks then do at
    the same :meth:`check`. While it is open:

    - every rank passes the same checks in the same order;
    - an error ends the job by :func:`hvdtrain.failure.end_job`, within the ``with`` block.

    Args:
        collectives: what ranks first find each other by (default: those of ``hvdtrain.init()``).
        stall_timeout_s: after how long a rank that is not heard of, or a job in which no rank's main thread
            moves on, is ended; 0 for never.
    """

    def __init__(self, collectives: "Collectives | None" = None, *, stall_timeout_s: float = 600.0):
        if stall_timeout_s < 0:
            raise UsageError(f"stall_timeout_s must be 0, for never, or more. Received: {stall_timeout_s}")
        if collectives is None:
            from hvdtrain import runtime  # which takes seconds to import, and tests of this need none of it

            collectives = runtime.current().collectives
        self._collectives = collectives
        self._stall_timeout_s = stall_timeout_s
        self._stop_point = StopPoint()
        self._position = Position()
        self._last_work: list[Callable[[], None]] = []
        self._control: Control | None = None

    def start(self) -> None:
        """Connects the ranks. Every rank has to call it.

        Signals are caught if this is Python's main thread.

        Raises:
            JobError: on every rank, where one does not reach rank 0.
        """
        self._control = Control(
            self._collectives.rank,
            open_channel(self._collectives),
            stop_point=self._stop_point,
            position=lambda: self._position,
            last_work=self._do_last_work,
            stall_timeout_s=self._stall_timeout_s,
        )
        self._control.start()

    def close(self) -> None:
        """Takes leave of the other ranks, and gives signals back. To be called by the thread that started.

        Not a collective: other ranks may go on, and take this rank's end for no loss.
        """
        if self._control is not None:
            self._control.close()
            self._control = None

    def __enter__(self) -> "JobWatch":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def check(self) -> bool:
        """Passes a point that all ranks pass in the same order; True where all of them are to stop at this one."""
        return self._stop_point.check()

    @property
    def stop_is_coming(self) -> bool:
        """True when a stop is asked for, as far as this rank knows; other ranks may learn it later."""
        return self._stop_point.is_coming

    @property
    def stop_reason(self) -> str | None:
        """What asked for the stop: ``SIGTERM on rank 1 (host b)``."""
        return self._stop_point.reason

    def request_stop(self, reason: str) -> None:
        """Asks all ranks to stop, as a signal does."""
        if self._control is not None:
            self._control.ask_to_stop(reason)

    def beat(self, where: str, step: int) -> None:
        """Says that the main thread moves on. All ranks say it at the same places of the run."""
        self._position = Position(self._position.beats + 1, where, step)

    def before_end(self, action: Callable[[], None]) -> None:
        """Has an action run, for 3 seconds at most, on another thread, before this process is ended by others."""
        self._last_work.append(action)

    def do_last_work(self) -> None:
        """Runs what :meth:`before_end` was given, for 3 seconds at most."""
        run_for(LAST_WORK_S, self._do_last_work)

    def fail(self, code: int) -> None:
        """Has all other ranks end with this exit code, at once; this rank's cause was told."""
        if self._control is not None:
            self._control.fail(code)
        self.do_last_work()

    def wait_for_cause(self, timeout_s: float) -> None:
        """Waits for another rank to tell why the job ends; if it does, this process ends meanwhile."""
        if self._control is not None:
            self._control.wait_for_end(timeout_s)

    def _do_last_work(self) -> None:
        for action in self._last_work:
            with contextlib.suppress(Exception):  # The process ends either way, with a cause that matters more.
                action()
