"""Files that can be made again: written aside, then renamed, so that nobody ever reads half of one."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from hvdtrain import process


def cache_name(path: Path) -> str:
    """What stands for a file in the names of files made from it: a digest of its absolute path."""
    return hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:24]


@contextmanager
def written_aside(path: Path) -> Iterator[BinaryIO]:
    """A file to write to that becomes ``path`` at the end, unless an exception comes before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Hosts may share the folder, and process ids repeat between hosts.
    aside = path.with_name(f"{path.name}.{process.host_name()}-{os.getpid()}")
    try:
        with open(aside, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
