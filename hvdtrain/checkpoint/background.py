"""One write at a time, on a thread of its own."""

import threading
from collections.abc import Callable


class BackgroundWriter:
    """Runs writes one after the other and counts those that fail.

    Args:
        failed: told of each error, on the thread of the write.
    """

    def __init__(self, failed: Callable[[Exception], None]):
        self._tell_failed = failed
        self._thread: threading.Thread | None = None
        self.failures_in_a_row = 0
        self.last_error: Exception | None = None

    def start(self, write: Callable[[], None]) -> None:
        """Begins a write; waits first for the one before."""
        self.wait()
        # A daemon: an end that cannot wait leaves half a folder aside, which no reader takes for a checkpoint.
        self._thread = threading.Thread(target=self._run, args=(write,), name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits for the write that is under way."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:
            # Counted here and raised by the thread that trains, which alone can end the job in order.
            self.failures_in_a_row += 1
            self.last_error = error
            self._tell_failed(error)
        else:
            self.failures_in_a_row = 0
