"""Signals that ask to stop, heard while the main thread is in C++ too."""

import signal
import threading
from typing import Any

# SIGUSR1 is one that mpirun passes on to its ranks without setting them a time limit.
_CAUGHT = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopSignals:
    """Turns signals into bytes that another thread reads.

    Python runs its handlers on the main thread, between two instructions of its own: never while that
    thread waits in a reduction. What it does at once, in the C handler, is write the signal's number to
    the wakeup file descriptor.
    """

    def __init__(self) -> None:
        self._previous: dict[signal.Signals, Any] = {}
        self._previous_fd = -1

    def install(self, wakeup_fd: int) -> None:
        """Catches the signals from now on; does nothing outside of the main thread, where Python forbids it."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._previous_fd = signal.set_wakeup_fd(wakeup_fd, warn_on_full_buffer=False)
        for number in _CAUGHT:
            # Without a handler of Python's, the signal would end the process.
            self._previous[number] = signal.signal(number, lambda number, frame: None)

    def restore(self) -> None:
        """Gives the signals back to whom they belonged before."""
        if not self._previous or threading.current_thread() is not threading.main_thread():
            return
        for number, handler in self._previous.items():
            # None: it was not set from Python, and cannot be from here.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._previous_fd)
        self._previous = {}


def names_in(written: bytes) -> list[str]:
    """The names of the caught signals among what Python wrote to the wakeup file descriptor."""
    return [signal.Signals(number).name for number in written if number in _CAUGHT]
