"""The files of a data set, found by rank 0, and checked by all ranks to be the same and unchanged.

A file system that thousands of ranks share handles some 10,000 metadata requests per second: in large jobs, ranks share
the list of files and divide the checks.
"""

import contextlib
import glob
import hashlib
import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hvdtrain.data.cache import cache_file
from hvdtrain.data.downloads import cache_folder_of
from hvdtrain.data.unpacking import is_packed, unpack, unpacked_path
from hvdtrain.errors import DataError, UsageError
from hvdtrain.fault_tolerance.collective_errors import on_every_rank, on_first_rank

if TYPE_CHECKING:
    from hvdtrain.distributed.collectives import Collectives

MANY_FILES = 1000
"""The number of files from which it is cached which of them are GZIP files."""
MAX_CHECKS = 10**6
"""The most checks of files by all ranks together, though each file is checked by at least one rank."""


class RecordFile(NamedTuple):
    """A file as this rank found it; a tuple, because there may be a hundred thousand, which are sent to all ranks."""

    name: str
    """Its path."""
    size: int
    mtime_ns: int
    cache_folder: Path
    unpacked: Path | None
    """The unpacked copy of a GZIP file."""

    @property
    def path(self) -> Path:
        """The file itself."""
        return Path(self.name)

    @property
    def readable(self) -> Path:
        """The file itself, or its unpacked copy."""
        return self.unpacked or self.path

    @property
    def is_packed(self) -> bool:
        """Whether it is read from an unpacked copy."""
        return self.unpacked is not None


def find_files(
    patterns: Sequence[str | Path], cache_dir: str | Path | None, collectives: "Collectives"
) -> list[RecordFile]:
    """The files that match, in sorted order; GZIP files are unpacked once per host. Collective.

    Raises:
        JobError: on every rank, if one finds no file, or cannot read one.
    """
    found = on_first_rank(lambda: _found(patterns, cache_dir), collectives)
    if len(found) * collectives.size <= MAX_CHECKS:
        files = on_every_rank(lambda: _found(patterns, cache_dir) if collectives.rank else found, collectives)
    else:
        files = on_every_rank(lambda: _as_found_here(found, cache_dir) if collectives.rank else found, collectives)
    on_every_rank(lambda: _unpack(files[collectives.local_rank :: collectives.local_size]), collectives)
    return files


def to_check(num_files: int, rank: int, size: int) -> range:
    """The numbers of the files that a rank checks: all, or its part of them in large jobs."""
    count = min(num_files, max(-(-num_files // size), MAX_CHECKS // size))
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
    statuses: dict[str, os.stat_result] = {}
    for pattern in patterns:
        normal = str(Path(pattern))
        # A file name may contain brackets.
        found = _files_in([normal]) or _files_in(glob.iglob(normal))
        if not found:
            raise DataError(f"files must name at least one file. Received: {pattern}, which matches none")
        statuses |= found
    folders = {folder: _cache_folder(Path(folder), cache_dir) for folder in {*map(os.path.dirname, statuses)}}
    # In several folders as paths are sorted, part by part.
    names = sorted(statuses, key=(lambda name: name.split(os.sep)) if len(folders) > 1 else None)
    packed = _packed(names, statuses, folders[os.path.dirname(names[0])])
    return [_file(name, statuses[name], name in packed, folders[os.path.dirname(name)]) for name in names]


def _files_in(paths: Iterable[str]) -> dict[str, os.stat_result]:
    found = {}
    for path in paths:
        try:
            status = os.stat(path)
        except (OSError, ValueError):
            continue
        if stat.S_ISREG(status.st_mode):
            found[path] = status
    return found


def _packed(names: Sequence[str], statuses: dict[str, os.stat_result], cache_folder: Path) -> set[str]:
    """The GZIP files among them; for very many files this is cached, so that a job need not open each of them."""
    if len(names) < MANY_FILES:
        return {name for name in names if _is_packed(name)}
    states = [(os.path.abspath(name), statuses[name].st_size, statuses[name].st_mtime_ns) for name in names]
    digest = hashlib.sha256(repr(states).encode(errors="surrogateescape"))
    entry = cache_folder / "packed" / f"{digest.hexdigest()[:24]}.npy"
    with contextlib.suppress(OSError, ValueError, EOFError):
        return {name for name, is_one in zip(names, np.load(entry), strict=True) if is_one}
    packed = {name for name in names if _is_packed(name)}
    with contextlib.suppress(OSError), cache_file(entry) as file:
        np.save(file, np.array([name in packed for name in names]))
    return packed


def _is_packed(name: str) -> bool:
    try:
        return is_packed(Path(name))
    except OSError as error:
        raise DataError(f"each file must be readable. Received: {name}: {error.strerror}") from error


def _file(name: str, status: os.stat_result, packed: bool, cache_folder: Path) -> RecordFile:
    unpacked = unpacked_path(Path(name), cache_folder) if packed else None
    return RecordFile(name, status.st_size, status.st_mtime_ns, cache_folder, unpacked)


def _as_found_here(files: Sequence[RecordFile], cache_dir: str | Path | None) -> list[RecordFile]:
    """Rank 0's files as another rank finds them: each host has its own cache folder."""
    names = [os.path.dirname(file.name) for file in files]
    folders = {name: _cache_folder(Path(name), cache_dir) for name in {*names}}
    return [
        _file(file.name, status_of(file.path), True, folders[name])
        if file.is_packed
        else file._replace(cache_folder=folders[name])
        for file, name in zip(files, names, strict=True)
    ]


def _cache_folder(path: Path, cache_dir: str | Path | None) -> Path:
    return cache_folder_of(path) if cache_dir is None else Path(cache_dir)


def _unpack(files: Sequence[RecordFile]) -> None:
    for file in files:
        if file.unpacked is not None:
            unpack(file.path, file.unpacked)
