"""Writes files and folders atomically: to a temporary path, synced to disk, then renamed."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_TEMPORARY = ".writing-"


@contextmanager
def replaced_on_success(
    path: Path, aside: Path | None = None, *, verify: Callable[[Path], None] | None = None
) -> Iterator[Path]:
    """Yields a temporary path for a file or folder, which is renamed to ``path`` unless the block raises.

    Args:
        aside: the temporary path, on the same disk (default: ``.writing-NAME``, which keeps the suffix, as some
            writers require; see :func:`is_temporary`).
        verify: called with the temporary path after it is synced to disk; raises to reject it.
    """
    aside = aside or path.with_name(f"{_TEMPORARY}{path.name}")
    remove(aside)
    with removed_on_failure(aside):
        yield aside
        commit(aside, path, verify)


@contextmanager
def removed_on_failure(path: Path) -> Iterator[None]:
    """Deletes a temporary file or folder if the block raises."""
    try:
        yield
    except BaseException:
        with suppress(OSError):  # The first error matters more.
            remove(path)
        raise


def commit(aside: Path, path: Path, verify: Callable[[Path], None] | None = None) -> None:
    """Syncs a temporary file or folder to disk and renames it to ``path``.

    Args:
        verify: see :func:`replaced_on_success`.
    """
    sync(aside)
    if verify is not None:
        verify(aside)
    aside.replace(path)
    _flush(path.parent)  # not recursively: other files in it may be large, or be deleted meanwhile


def require_regular(path: Path) -> None:
    """Raises OSError if a path exists and is not a regular file: opening a FIFO would wait for its other end."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def is_temporary(path: Path) -> bool:
    """Whether a path was left by a process that was killed while it wrote a file or folder."""
    # The second form is that of checkpoints.
    return path.name.startswith(_TEMPORARY) or (path.name.startswith(".") and path.name.endswith(".writing"))


def write_text(path: Path, text: str) -> None:
    """Writes a small file; readers see the old or the new content, never a part."""
    with replaced_on_success(path) as aside:
        aside.write_text(text, encoding="utf-8")


def sync(path: Path) -> None:
    """Flushes a file, or a folder with its files, to disk."""
    if path.is_dir():
        for each in sorted(path.iterdir()):
            sync(each)
    _flush(path)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Deletes a file or folder if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
