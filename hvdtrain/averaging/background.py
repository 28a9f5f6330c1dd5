"""A reduction that is made at once, or on a thread of its own."""

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Now(Generic[T]):
    """The result of a function, which is called at once."""

    is_done = True

    def __init__(self, function: Callable[[], T]):
        began_s = time.perf_counter()
        self._result = function()
        self.seconds = time.perf_counter() - began_s
        """How long it took."""

    def result(self) -> T:
        return self._result


class Background(Generic[T]):
    """Runs a function on another thread from now on; its error is raised where the result is asked for."""

    def __init__(self, function: Callable[[], T], name: str):
        self._function = function
        self._result: list[T] = []
        self._error: BaseException | None = None
        self.seconds = 0.0
        """How long it took, once it is done."""
        # A daemon: where other ranks are lost, a reduction never ends, and must not keep this process.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        began_s = time.perf_counter()
        try:
            self._result.append(self._function())
        except BaseException as error:
            self._error = error
        self.seconds = time.perf_counter() - began_s

    @property
    def is_done(self) -> bool:
        """Whether there is a result, or an error."""
        return not self._thread.is_alive()

    def result(self) -> T:
        """Waits for it."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result[0]
