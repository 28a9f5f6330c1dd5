"""Reads files whose size somebody else may have chosen, without ever holding more of them than is expected."""

import errno
from collections.abc import Iterator
from pathlib import Path

from hvdtrain.system.atomic_files import require_regular

MAX_BYTES = 64 << 20
"""The largest file, or line of a log, that is read as a whole: a manifest, a summary, a list of checksums."""
MAX_LINES_BYTES = 4 << 30
"""The largest log that is read line by line."""


def read_bytes(path: Path) -> bytes:
    """Returns the content of a file of at most ``MAX_BYTES``.

    Raises:
        OSError: the file is missing, not a regular one, too large, or cannot be read.
    """
    require_regular(path)
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise _too_large(path, MAX_BYTES)
    return content


def read_lines(path: Path) -> Iterator[bytes]:
    """Yields the lines of a file, with their ends, without those of more than ``MAX_BYTES``.

    Raises:
        OSError: the file is missing, not a regular one, has more than ``MAX_LINES_BYTES``, or cannot be read.
    """
    require_regular(path)
    if path.stat().st_size > MAX_LINES_BYTES:
        raise _too_large(path, MAX_LINES_BYTES)
    with path.open("rb") as file:
        while line := file.readline(MAX_BYTES):
            if len(line) < MAX_BYTES or line.endswith(b"\n"):
                yield line
                continue
            while (line := file.readline(MAX_BYTES)) and not line.endswith(b"\n"):
                pass


def _too_large(path: Path, max_bytes: int) -> OSError:
    return OSError(errno.EFBIG, f"the file must have at most {max_bytes >> 20} MiB", str(path))
