"""Catches the signals that stop a job, also while the main thread runs C++ code."""

import signal
import threading
from typing import Any

# mpirun forwards SIGUSR1 to its ranks without imposing a time limit on them. A terminal that closes sends SIGHUP.
_CAUGHT = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


class StopSignals:
    """Turns signals into bytes that another thread reads.

    Python runs signal handlers on the main thread, between two of its bytecode instructions: never while
    that thread waits in a reduction. Its C handler, however, writes the signal number to the wakeup file
    descriptor immediately.
    """

    def __init__(self) -> None:
        self._previous: dict[signal.Signals, Any] = {}
        self._previous_fd = -1

    def install(self, wakeup_fd: int) -> None:
        """Starts catching signals; does nothing outside the main thread, where Python forbids it."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._previous_fd = signal.set_wakeup_fd(wakeup_fd, warn_on_full_buffer=False)
        for number in _CAUGHT:
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup
            # Without a Python handler the signal would end the process.
            self._previous[number] = signal.signal(number, lambda number, frame: None)

    def restore(self, *, ignore: bool = False) -> None:
        """Restores the previous signal handlers, or ignores the signals: the exit code of the process is decided."""
        if not self._previous or threading.current_thread() is not threading.main_thread():
            return
        for number, handler in self._previous.items():
            # None: the handler was not installed from Python and cannot be restored from it.
            signal.signal(number, signal.SIG_IGN if ignore else signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._previous_fd)
        self._previous = {}


def names_in(written: bytes) -> list[str]:
    """Returns the names of the caught signals among the bytes read from the wakeup file descriptor."""
    return [_name_of(number) for number in written if number in _CAUGHT]


def _name_of(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
