"""A lock that the processes of a host take for a folder."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def one_process_at_a_time(folder: Path) -> Iterator[None]:
    """In the block, no other process of this host is in one for the same folder, unless its disk has no locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
