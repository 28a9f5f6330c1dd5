"""GZIP files, unpacked into the cache folder once per host because they do not allow random access."""

import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from hvdtrain.data.cache import cache_file, cache_name
from hvdtrain.data.record_index import HEADER_BYTES, has_record_header
from hvdtrain.errors import DataError

_MAGIC = b"\x1f\x8b\x08"
_CHUNK_BYTES = 1 << 16
_GZIP_FORMAT = 31


def is_packed(path: Path) -> bool:
    """Whether a file is a GZIP file."""
    with open(path, "rb") as file:
        start = file.read(HEADER_BYTES)
    # The magic bytes can also be the length of a TFRecord, followed by its checksum.
    return start.startswith(_MAGIC) and not has_record_header(start)


def unpacked_path(path: Path, cache_folder: Path) -> Path:
    """The unpacked copy of a file in its current state."""
    status = os.stat(path)
    return cache_folder / "unpacked" / f"{cache_name(path)}-{status.st_size}-{status.st_mtime_ns}.tfrecord"


def unpacking_error(target: Path) -> str | None:
    """Why unpacking stopped before the end of the GZIP file; None if it was complete."""
    note = _note(target)
    return note.read_text() if note.exists() else None


def unpack(path: Path, target: Path) -> None:
    """Unpacks a file to :func:`unpacked_path`, up to the first damage, unless it is already there.

    Raises:
        DataError: the cache folder cannot be written.
    """
    if target.exists():
        return
    try:
        for other in target.parent.glob(f"{cache_name(path)}-*"):
            # Keep what another host that shares the folder is writing for the current state of the file.
            if not other.name.startswith(target.stem):
                other.unlink(missing_ok=True)
        with open(path, "rb") as packed, cache_file(target) as file:
            try:
                for data in _unpacked(packed):
                    file.write(data)
            except (zlib.error, EOFError) as error:
                # Written before the file is renamed: a process that finds the file also finds its note.
                with cache_file(_note(target)) as note:
                    note.write(f"the GZIP data is damaged: {error}".encode())
    except OSError as error:
        raise DataError(
            f"GZIP files are unpacked into the cache folder, which must be writable and have enough space. Received: "
            f"{path} into {target.parent}: {error.strerror}. Pass another folder as cache_dir, or unpack the file."
        ) from error


def _note(target: Path) -> Path:
    return target.with_suffix(".damage")


def _unpacked(file: BinaryIO) -> Iterator[bytes]:
    stream = zlib.decompressobj(_GZIP_FORMAT)
    chunk = b""
    while chunk := chunk or file.read(_CHUNK_BYTES):
        if stream.eof:
            if not chunk.strip(b"\0"):
                return  # padding
            stream = zlib.decompressobj(_GZIP_FORMAT)
        before = stream.copy()
        try:
            yield stream.decompress(chunk)
        except zlib.error:
            # The output of a failing call is lost: decompress again, byte by byte, up to the damage.
            for i in range(len(chunk)):
                yield before.decompress(chunk[i : i + 1])
        chunk = stream.unused_data
    if not stream.eof:
        raise EOFError("unexpected end of file")
