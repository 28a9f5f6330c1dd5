"""Ctrl-C while modules are imported."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

EXIT_CODE = 130
"""What a shell reports for a program that SIGINT ended."""
MESSAGE = "hvdtrain: stopped by Ctrl-C before there was anything to save."


@contextlib.contextmanager
def exit_on_interrupt() -> Iterator[None]:
    """Within the block, SIGINT ends the process with one line instead of raising KeyboardInterrupt.

    For imports: some modules catch every exception while they are imported, and the program would continue.
    """
    own_handler = signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    if own_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    # A copy: output to stderr is held back while TensorFlow is imported.
    try:
        stderr = os.dup(2)
    except OSError:
        stderr = os.open(os.devnull, os.O_WRONLY)

    def end(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(OSError):
            os.write(stderr, f"{MESSAGE}\n".encode())
        os._exit(EXIT_CODE)

    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.close(stderr)
