"""A reduction that is made at once, or on a thread of its own."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Now(Generic[T]):
    """The result of a function, which is called at once."""

    is_done = True

    def __init__(self, function: Callable[[], T]):
        self._result = function()

    def result(self) -> T:
        return self._result


class Background(Generic[T]):
    """Runs a function on another thread from now on; its error is raised where the result is asked for."""

    def __init__(self, function: Callable[[], T], name: str):
        self._function = function
        self._result: list[T] = []
        self._error: BaseException | None = None
        # A daemon: where other ranks are lost, a reduction never ends, and must not keep this process.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result.append(self._function())
        except BaseException as error:
            self._error = error

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
