"""Writes checkpoints in the background, one at a time."""

from collections.abc import Callable

from hvdtrain.system.background import BackgroundTask


class BackgroundWriter:
    """Runs one write at a time on another thread and counts consecutive failures.

    Args:
        failed: called with each error, on the thread of the write.
    """

    def __init__(self, failed: Callable[[Exception], None]):
        self._failed = failed
        self._task: BackgroundTask[None] | None = None
        self.consecutive_failures = 0
        self.last_error: Exception | None = None

    def start(self, write: Callable[[], None]) -> None:
        """Starts a write, after waiting for the previous one."""
        self.wait()
        # A daemon thread: a process that cannot wait for it leaves an unfinished folder, which readers ignore.
        self._task = BackgroundTask(lambda: self._run(write), "hvdtrain-checkpoint")

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits for the current write."""
        if self._task is not None:
            self._task.wait(timeout_s)

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:
            # Counted here and raised by the training thread, which alone can end the job in order.
            self.consecutive_failures += 1
            self.last_error = error
            self._failed(error)
        else:
            self.consecutive_failures = 0
