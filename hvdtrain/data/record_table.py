"""The location of each record of a data set: in memory, or for very many records in a file that the ranks of a host
share."""

import contextlib
import dataclasses
import functools
import hashlib
import os
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from hvdtrain.data.cache import cache_file
from hvdtrain.data.record_files import RecordFile
from hvdtrain.data.record_index import FRAME_BYTES, RecordIndex, cached_index, index_entry
from hvdtrain.data.sample_plan import MAX_IN_MEMORY
from hvdtrain.data.unpacking import unpacking_error
from hvdtrain.errors import DataError
from hvdtrain.fault_tolerance.collective_errors import on_every_rank, on_first_rank

if TYPE_CHECKING:
    from hvdtrain.distributed.collectives import Collectives

PIECE_RECORDS = 1 << 21
"""Offsets that are sent in one message."""
_OFFSET = np.dtype("<i8")


@dataclasses.dataclass(frozen=True, eq=False)
class FileTable:
    """Facts about each file, without its records; each array has one number per file, int64."""

    counts: np.ndarray
    """The number of records."""
    ends: np.ndarray
    """Where the last record ends, in bytes."""
    sizes: np.ndarray
    """The size in bytes."""
    damage: dict[int, tuple[int, str]]
    """The damaged files: the offset from which one is unreadable, and the cause."""
    name: str
    """Identifies the files in their present state."""

    @property
    def num_records(self) -> int:
        """The number of records of all files."""
        return int(self.counts.sum())

    @functools.cached_property
    def first_numbers(self) -> np.ndarray:
        """The number of the first record of each file, counted across files."""
        return np.cumsum(self.counts) - self.counts


@dataclasses.dataclass(frozen=True, eq=False)
class RecordTable:
    """All records of all files."""

    files: FileTable
    offsets: np.ndarray
    """The start of each record in its file, in bytes, int64; possibly a memory map."""

    def file_of(self, record: int) -> int:
        """The number of the file that holds a record, counted across files."""
        return int(np.searchsorted(self.files.first_numbers, record, side="right")) - 1

    def place_of(self, record: int) -> tuple[int, int, int]:
        """The file of a record, its offset there and the length of its data, in bytes."""
        file = self.file_of(record)
        is_last = record + 1 == self.files.first_numbers[file] + self.files.counts[file]
        end = self.files.ends[file] if is_last else self.offsets[record + 1]
        return file, int(self.offsets[record]), int(end - self.offsets[record]) - FRAME_BYTES

    def digest(self) -> "hashlib._Hash":
        """A digest of the records' offsets, or of the files' numbers of records if there are very many records."""
        if self.files.num_records <= MAX_IN_MEMORY:
            return hashlib.sha256(self.offsets.tobytes())
        return hashlib.sha256(self.files.counts.tobytes() + self.files.ends.tobytes())


def open_table(files: Sequence[RecordFile], collectives: "Collectives") -> RecordTable:
    """Scans the files on rank 0's host, unless that was done before, and shares the result. Collective.

    Raises:
        JobError: on every rank, if there is no record, or the cache folder cannot hold a large table.
    """
    table: RecordTable | FileTable | None = on_first_rank(lambda: _stored(files), collectives)
    if table is None:
        on_every_rank(lambda: _index_own(files, collectives), collectives)
        table = on_first_rank(lambda: _scan(files), collectives)
    if isinstance(table, RecordTable):
        return table
    # Each host may have its own cache folder.
    path = _cached(files, table.name)
    _share(path, table, collectives)
    return RecordTable(table, on_every_rank(lambda: np.memmap(path, _OFFSET, "r"), collectives))


def _index_own(files: Sequence[RecordFile], collectives: "Collectives") -> None:
    """Scans this rank's part of the new files for rank 0, whose cache folder this host's ranks share."""
    if collectives.cross_rank == 0 and collectives.local_size > 1:
        for file in files[collectives.local_rank :: collectives.local_size]:
            if not index_entry(file.path, file.cache_folder).exists():
                _index(file)


def _index(file: RecordFile) -> RecordIndex:
    return cached_index(
        file.path, file.cache_folder, file.readable, unpacking_error(file.readable) if file.is_packed else None
    )


def _stored(files: Sequence[RecordFile]) -> FileTable | None:
    """The table of very many records that an earlier job has stored."""
    name = _name(files)
    return _read(_cached(files, name), name)


def _scan(files: Sequence[RecordFile]) -> RecordTable | FileTable:
    """The records; if there are very many, only the files, because the offsets are in the cache folder."""
    name = _name(files)
    path = _cached(files, name)
    counts, ends, sizes = (np.zeros(len(files), np.int64) for _ in range(3))
    damage: dict[int, tuple[int, str]] = {}
    kept: list[np.ndarray] = []
    stored: BinaryIO | None = None
    num_records = 0
    with contextlib.ExitStack() as stack:
        for i, file in enumerate(files):
            index = _index(file)
            counts[i], sizes[i] = len(index.offsets), index.file_bytes
            ends[i] = index.offsets[-1] + index.lengths[-1] + FRAME_BYTES if counts[i] else 0
            if index.damage is not None:
                damage[i] = (index.damage.offset_bytes, index.damage.cause)
            kept.append(index.offsets)
            num_records += len(index.offsets)
            if num_records > MAX_IN_MEMORY:
                stored = stored or stack.enter_context(_new_file(path))
                _write(stored, kept)
    table = FileTable(counts, ends, sizes, damage, name)
    if stored is None:
        return RecordTable(table, np.concatenate([np.zeros(0, np.int64), *kept]))
    _store(path, table)
    return table


def _store(path: Path, table: FileTable) -> None:
    """Writes the facts about the files whose offsets are at a path."""
    with _new_file(_files_of(path)) as file:
        np.savez(
            file,
            counts=table.counts,
            ends=table.ends,
            sizes=table.sizes,
            damaged=np.array([*table.damage], np.int64),
            damage_offsets=np.array([offset for offset, _ in table.damage.values()], np.int64),
            causes=np.array([cause for _, cause in table.damage.values()], np.str_),
        )


def _read(path: Path, name: str) -> FileTable | None:
    """The table that an earlier job has stored, if it is complete."""
    with (
        contextlib.suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile),
        np.load(_files_of(path)) as stored,
    ):
        damage = zip(stored["damage_offsets"].tolist(), stored["causes"].tolist(), strict=True)
        damaged = dict(zip(stored["damaged"].tolist(), damage, strict=True))
        table = FileTable(stored["counts"], stored["ends"], stored["sizes"], damaged, name)
        if _is_complete(path, table):
            return table
    return None


def _share(path: Path, table: FileTable, collectives: "Collectives") -> None:
    """Sends the offsets to hosts that do not have them, in pieces."""
    is_missing = collectives.local_rank == 0 and not _is_complete(path, table)
    (num_missing,) = collectives.sum([np.array(is_missing, np.float32)])
    if not num_missing:
        return
    own = np.memmap(path, _OFFSET, "r") if collectives.rank == 0 else None
    with contextlib.ExitStack() as stack:
        file = on_every_rank(lambda: stack.enter_context(_new_file(path)) if is_missing else None, collectives)
        for start in range(0, table.num_records, PIECE_RECORDS):
            sent = None if own is None else own[start : start + PIECE_RECORDS].tobytes()
            _write_piece(file, collectives.allgather(sent)[0], collectives)
        on_every_rank(stack.close, collectives)


def _write_piece(file: BinaryIO | None, piece: bytes, collectives: "Collectives") -> None:
    on_every_rank(lambda: None if file is None else file.write(piece), collectives)


def _write(file: BinaryIO, offsets: list[np.ndarray]) -> None:
    for each in offsets:
        file.write(np.ascontiguousarray(each, _OFFSET).data)
    offsets.clear()


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    try:
        with cache_file(path) as file:
            yield file
    except OSError as error:
        raise DataError(
            f"the offsets of more than {MAX_IN_MEMORY:,} records are kept in the cache folder, which must be writable "
            f"and have enough space. Received: {path.parent}: {error.strerror}. Pass another folder as cache_dir."
        ) from error


def _is_complete(path: Path, table: FileTable) -> bool:
    try:
        return path.stat().st_size == table.num_records * _OFFSET.itemsize
    except OSError:
        return False


def _cached(files: Sequence[RecordFile], name: str) -> Path:
    return files[0].cache_folder / "records" / f"{name}.offsets"


def _files_of(path: Path) -> Path:
    return path.with_suffix(".npz")


def _name(files: Sequence[RecordFile]) -> str:
    """Identifies the files in their present state."""
    states = [
        (os.path.abspath(file.name), file.size, file.mtime_ns, file.unpacked and file.unpacked.stat().st_size)
        for file in files
    ]
    return hashlib.sha256(repr(states).encode(errors="surrogateescape")).hexdigest()[:24]
