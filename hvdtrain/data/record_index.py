"""Record index of a TFRecord file: the offset and length of each record. Does not import TensorFlow.

A record consists of the length of its data (8 bytes, little endian), the checksum of the length (4), the
data, and the checksum of the data (4). Checksums are masked CRC-32C:
https://www.tensorflow.org/tutorials/load_data/tfrecord
"""

import dataclasses
import os
import struct
import zipfile
from contextlib import suppress
from pathlib import Path

import google_crc32c
import numpy as np

from hvdtrain.data.cache import cache_file, cache_name

_LENGTH = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _LENGTH.size + _CHECKSUM.size
FRAME_BYTES = HEADER_BYTES + _CHECKSUM.size


class UnreadableRecordError(Exception):
    """A record cannot be read; the message is the cause."""


@dataclasses.dataclass(frozen=True)
class Damage:
    """The offset from which a file is unreadable, and the cause."""

    offset_bytes: int
    cause: str


@dataclasses.dataclass(frozen=True, eq=False)
class RecordIndex:
    """The records of one file, in file order."""

    offsets: np.ndarray
    """Start of each record in bytes, int64."""
    lengths: np.ndarray
    """Length of each record's data in bytes, int64."""
    file_bytes: int
    damage: Damage | None


def has_record_header(start: bytes) -> bool:
    """Whether these first bytes of a file are a valid record header."""
    return len(start) >= HEADER_BYTES and _masked_checksum(start[: _LENGTH.size]) == start[_LENGTH.size : HEADER_BYTES]


def index_records(path: Path) -> RecordIndex:
    """Scans a file from header to header. Data checksums are verified when a record is read.

    Raises:
        OSError: the file cannot be read.
    """
    lengths: list[int] = []
    damage = None
    descriptor = os.open(path, os.O_RDONLY)
    try:
        file_bytes = os.fstat(descriptor).st_size
        offset = 0
        while offset < file_bytes and damage is None:
            header = os.pread(descriptor, HEADER_BYTES, offset)
            rest = file_bytes - offset
            if len(header) < HEADER_BYTES:
                damage = Damage(offset, f"the last record is truncated: {rest} bytes left")
            elif not has_record_header(header):
                damage = Damage(offset, f"wrong checksum of a record's length: {rest} bytes cannot be read")
            elif (needed := _LENGTH.unpack_from(header)[0] + FRAME_BYTES) > rest:
                damage = Damage(offset, f"the last record is truncated: {rest} of {needed} bytes left")
            else:
                lengths.append(needed - FRAME_BYTES)
                offset += needed
    finally:
        os.close(descriptor)
    if file_bytes == 0:
        damage = Damage(0, "the file is empty")
    sizes = np.array(lengths, dtype=np.int64)
    frames = sizes + FRAME_BYTES
    return RecordIndex(np.cumsum(frames) - frames, sizes, file_bytes, damage)


def index_entry(path: Path, cache_folder: Path) -> Path:
    """Where the index of a file is kept."""
    return cache_folder / "index" / f"{cache_name(path)}.npz"


def cached_index(path: Path, cache_folder: Path, readable: Path, unpacking_error: str | None) -> RecordIndex:
    """The index of a file, from the cache if the file has not changed since.

    Args:
        path: the data file, the key of the cache entry.
        readable: the file to scan: ``path``, or its unpacked copy.
        unpacking_error: why unpacking stopped before the end; None if it was complete.
    """
    status = os.stat(path)
    identity = np.array([status.st_size, status.st_mtime_ns, os.stat(readable).st_size])
    entry = index_entry(path, cache_folder)
    # If the entry is missing, outdated or truncated, the file is scanned again.
    with suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile), np.load(entry) as cached:
        if np.array_equal(cached["identity"], identity):
            damage = (
                Damage(int(cached["damage_offset"]), str(cached["damage_cause"])) if cached["damage_cause"] else None
            )
            return RecordIndex(cached["offsets"], cached["lengths"], int(identity[2]), damage)
    index = index_records(readable)
    if unpacking_error is not None:
        index = _up_to_last_good_record(index, readable, unpacking_error)
    # The cache only saves time: an unwritable folder must not fail the job.
    with suppress(OSError), cache_file(entry) as file:
        np.savez(
            file,
            identity=identity,
            offsets=index.offsets,
            lengths=index.lengths,
            damage_offset=-1 if index.damage is None else index.damage.offset_bytes,
            damage_cause="" if index.damage is None else index.damage.cause,
        )
    return index


def _up_to_last_good_record(index: RecordIndex, path: Path, cause: str) -> RecordIndex:
    """Drops trailing records that are garbage: decompression detects damage late."""
    count = len(index.offsets)
    end = index.file_bytes if index.damage is None else index.damage.offset_bytes
    descriptor = os.open(path, os.O_RDONLY)
    try:
        while count:
            try:
                read_record(descriptor, int(index.offsets[count - 1]), int(index.lengths[count - 1]))
                break
            except UnreadableRecordError:
                count -= 1
                end = int(index.offsets[count])
    finally:
        os.close(descriptor)
    return RecordIndex(index.offsets[:count], index.lengths[:count], index.file_bytes, Damage(end, cause))


def read_record(descriptor: int, offset: int, length: int) -> bytes:
    """The data of one record.

    Raises:
        UnreadableRecordError: a checksum is wrong, or the file ends before the record does.
    """
    record = os.pread(descriptor, length + FRAME_BYTES, offset)
    if len(record) < length + FRAME_BYTES:
        raise UnreadableRecordError(f"the record is truncated: {len(record)} of {length + FRAME_BYTES} bytes left")
    if not has_record_header(record) or _LENGTH.unpack_from(record)[0] != length:
        raise UnreadableRecordError("the record's length has changed since the file was opened")
    data = record[HEADER_BYTES : HEADER_BYTES + length]
    if _masked_checksum(data) != record[HEADER_BYTES + length :]:
        raise UnreadableRecordError("wrong data checksum")
    return data


def _masked_checksum(data: bytes) -> bytes:
    checksum = google_crc32c.value(data)
    rotated = (checksum >> 15 | checksum << 17) & 0xFFFFFFFF
    return _CHECKSUM.pack((rotated + 0xA282EAD8) & 0xFFFFFFFF)
