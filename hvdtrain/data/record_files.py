"""The files of a data set, found by rank 0, and checked by all ranks to be the same and unchanged.

A file system that thousands of ranks share answers some 10,000 questions about files a second: in large jobs, ranks
share the list of files and divide the checks.
"""

import dataclasses
import glob
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hvdtrain.data.downloads import cache_folder_of
from hvdtrain.data.unpacking import is_packed, unpack, unpacked_path
from hvdtrain.errors import DataError, UsageError
from hvdtrain.fault_tolerance.collective_errors import on_every_rank, on_first_rank

if TYPE_CHECKING:
    from hvdtrain.distributed.collectives import Collectives

_MAX_CHECKS = 10**6
"""How many files all ranks check together; if they must check fewer, each file is still checked by one."""


@dataclasses.dataclass(frozen=True)
class RecordFile:
    """A file as this rank found it."""

    path: Path
    size: int
    mtime_ns: int
    readable: Path
    """The file itself, or its unpacked copy."""
    cache_folder: Path

    @property
    def is_packed(self) -> bool:
        """Whether it is read from an unpacked copy."""
        return self.readable != self.path


def find_files(
    patterns: Sequence[str | Path], cache_dir: str | Path | None, collectives: "Collectives"
) -> list[RecordFile]:
    """The files that match, in sorted order; GZIP files are unpacked once per host. Collective.

    Raises:
        JobError: on every rank, if one finds no file, or cannot read one.
    """
    found = on_first_rank(lambda: _found(patterns, cache_dir), collectives)
    if len(found) * collectives.size <= _MAX_CHECKS:
        files = on_every_rank(lambda: _found(patterns, cache_dir) if collectives.rank else found, collectives)
    else:
        files = on_every_rank(lambda: [_as_found_here(each, cache_dir) for each in found], collectives)
    on_every_rank(lambda: _unpack(files) if collectives.local_rank == 0 else None, collectives)
    return files


def to_check(num_files: int, rank: int, size: int) -> range:
    """The numbers of the files that a rank checks: all, or its part of them in large jobs."""
    count = min(num_files, max(-(-num_files // size), _MAX_CHECKS // size))
    start = min(rank * count % num_files, num_files - count)
    return range(start, start + count)


def status_of(path: Path) -> os.stat_result:
    """The status of a file in use.

    Raises:
        DataError: it has been deleted.
    """
    try:
        return os.stat(path)
    except OSError as error:
        raise DataError(
            f"files must not be moved or deleted while in use. Received: {path}: {error.strerror}"
        ) from error


def require_unchanged(files: Sequence[RecordFile]) -> None:
    """Raises DataError if a file's size or modification time has changed since it was found."""
    for file in files:
        status = status_of(file.path)
        if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime_ns):
            raise DataError(
                f"files must not change while they are in use. Received: {file.path}, which had {file.size} bytes "
                f"and now has {status.st_size}. Restart the job to read the new file."
            )


def _found(patterns: Sequence[str | Path], cache_dir: str | Path | None) -> list[RecordFile]:
    if not patterns:
        raise UsageError("files must name at least one file. Received: none")
    paths: set[str] = set()
    for pattern in map(str, patterns):
        # A file name may contain brackets.
        found = [pattern] if os.path.isfile(pattern) else [path for path in glob.glob(pattern) if os.path.isfile(path)]
        if not found:
            raise DataError(f"files must name at least one file. Received: {pattern}, which matches none")
        paths.update(found)
    return [_open(path, cache_dir) for path in sorted(map(Path, paths))]


def _open(path: Path, cache_dir: str | Path | None) -> RecordFile:
    status = status_of(path)
    cache_folder = _cache_folder(path, cache_dir)
    try:
        readable = unpacked_path(path, cache_folder) if is_packed(path) else path
    except OSError as error:
        raise DataError(f"each file must be readable. Received: {path}: {error.strerror}") from error
    return RecordFile(path, status.st_size, status.st_mtime_ns, readable, cache_folder)


def _as_found_here(file: RecordFile, cache_dir: str | Path | None) -> RecordFile:
    """What rank 0 found, as another rank would find it: hosts have cache folders of their own."""
    if file.is_packed:
        return _open(file.path, cache_dir)
    return dataclasses.replace(file, cache_folder=_cache_folder(file.path, cache_dir))


def _cache_folder(path: Path, cache_dir: str | Path | None) -> Path:
    return cache_folder_of(path) if cache_dir is None else Path(cache_dir)


def _unpack(files: Sequence[RecordFile]) -> None:
    for file in files:
        if file.is_packed:
            unpack(file.path, file.readable)
