"""A function that runs on another thread, and one that was called immediately, behind the same interface."""

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class ImmediateTask(Generic[T]):
    """The result of a function that is called immediately."""

    is_done = True
    has_failed = False

    def __init__(self, function: Callable[[], T]):
        start_s = time.perf_counter()
        self._result = function()
        self.duration_s = time.perf_counter() - start_s

    def result(self) -> T:
        """The function's return value."""
        return self._result


class BackgroundTask(Generic[T]):
    """Starts a function on another thread; its error is raised by :meth:`result`.

    What the function holds is released when it has returned.
    """

    def __init__(self, function: Callable[[], T], name: str):
        self._result: list[T] = []
        self._error: BaseException | None = None
        self.duration_s = 0.0
        """How long it took, once it is done."""
        # A daemon: when other ranks are lost, a reduction never ends, and must not keep this process alive.
        self._thread = threading.Thread(target=self._run, args=(function,), name=name, daemon=True)
        self._thread.start()

    def _run(self, function: Callable[[], T]) -> None:
        start_s = time.perf_counter()
        try:
            self._result.append(function())
        except BaseException as error:
            self._error = error
        self.duration_s = time.perf_counter() - start_s

    @property
    def is_done(self) -> bool:
        """Whether the function has returned or raised."""
        return not self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        """Whether the function raised; waits for it."""
        self.wait()
        return self._error is not None

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits until the function has returned or raised, or the timeout has passed."""
        self._thread.join(timeout_s)

    def result(self) -> T:
        """Waits for the function; returns its value or raises its error."""
        self.wait()
        if self._error is not None:
            raise self._error
        return self._result[0]


def run_with_timeout(timeout_s: float, action: Callable[[], None]) -> None:
    """Runs an action that may hang, such as writing to a pipe that nobody reads, and waits at most this long."""
    BackgroundTask(action, "hvdtrain-timeout").wait(timeout_s)
