"""Where the records of a TFRecord file lie, and reading one of them; no TensorFlow here.

A record is the length of its data (8 bytes, little endian), that length's checksum (4), the data, and
the data's checksum (4). Checksums are CRC-32C, masked:
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

from hvdtrain.data.cache import cache_name, written_aside

_LENGTH = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _LENGTH.size + _CHECKSUM.size
_FRAME_BYTES = HEADER_BYTES + _CHECKSUM.size


class UnreadableRecordError(Exception):
    """The bytes at the place of a record are not that record; the message is the cause."""


@dataclasses.dataclass(frozen=True)
class Damage:
    """From where on a file is unreadable, and why."""

    offset_bytes: int
    cause: str


@dataclasses.dataclass(frozen=True, eq=False)
class RecordIndex:
    """The records of one file, in the order in which they stand there."""

    offsets: np.ndarray
    """Where each record begins, in bytes, int64."""
    lengths: np.ndarray
    """Bytes of each record's data, int64."""
    file_bytes: int
    damage: Damage | None


def has_record_header(start: bytes) -> bool:
    """Whether a file that begins with these bytes begins with a record."""
    return len(start) >= HEADER_BYTES and _masked_checksum(start[: _LENGTH.size]) == start[_LENGTH.size : HEADER_BYTES]


def index_records(path: Path) -> RecordIndex:
    """Walks through a file from header to header. Checksums of data are checked when a record is read.

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
                damage = Damage(offset, f"the last record is cut off: {rest} bytes are left of it")
            elif not has_record_header(header):
                damage = Damage(offset, f"the checksum of a record's length is wrong: {rest} bytes cannot be read")
            elif (needed := _LENGTH.unpack_from(header)[0] + _FRAME_BYTES) > rest:
                damage = Damage(offset, f"the last record is cut off: {rest} of its {needed} bytes are left")
            else:
                lengths.append(needed - _FRAME_BYTES)
                offset += needed
    finally:
        os.close(descriptor)
    if file_bytes == 0:
        damage = Damage(0, "the file is empty")
    sizes = np.array(lengths, dtype=np.int64)
    frames = sizes + _FRAME_BYTES
    return RecordIndex(np.cumsum(frames) - frames, sizes, file_bytes, damage)


def cached_index(path: Path, cache_folder: Path, readable: Path, unpacking_error: str | None) -> RecordIndex:
    """The index of a file, from the cache where that is of the file as it stands now.

    Args:
        path: the file that the index is kept under.
        readable: the file to walk through: ``path``, or what was unpacked from it.
        unpacking_error: why it could not be unpacked to its end.
    """
    status = os.stat(path)
    identity = np.array([status.st_size, status.st_mtime_ns, os.stat(readable).st_size])
    entry = cache_folder / "index" / f"{cache_name(path)}.npz"
    # No cache, one of an older file, or not a whole one: the file is walked through again.
    with suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile), np.load(entry) as kept:
        if np.array_equal(kept["identity"], identity):
            damage = Damage(int(kept["damage_offset"]), str(kept["damage_cause"])) if kept["damage_cause"] else None
            return RecordIndex(kept["offsets"], kept["lengths"], int(identity[2]), damage)
    index = index_records(readable)
    if unpacking_error is not None:
        index = _up_to_last_good_record(index, readable, unpacking_error)
    # The cache only saves time: a folder that cannot be written must not stop the job.
    with suppress(OSError), written_aside(entry) as file:
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
    """Unpacking notices damage late: what it made last may be garbage."""
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
    record = os.pread(descriptor, length + _FRAME_BYTES, offset)
    if len(record) < length + _FRAME_BYTES:
        raise UnreadableRecordError(
            f"the record is cut off: {len(record)} of its {length + _FRAME_BYTES} bytes are left"
        )
    if not has_record_header(record) or _LENGTH.unpack_from(record)[0] != length:
        raise UnreadableRecordError("the length is not the one that the record had when the file was opened")
    data = record[HEADER_BYTES : HEADER_BYTES + length]
    if _masked_checksum(data) != record[HEADER_BYTES + length :]:
        raise UnreadableRecordError("data checksum is wrong")
    return data


def _masked_checksum(data: bytes) -> bytes:
    checksum = google_crc32c.value(data)
    rotated = (checksum >> 15 | checksum << 17) & 0xFFFFFFFF
    return _CHECKSUM.pack((rotated + 0xA282EAD8) & 0xFFFFFFFF)
