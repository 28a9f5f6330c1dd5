"""Samples in TFRecord files."""

import dataclasses
import functools
import glob
import hashlib
import os
import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.data.downloads import cache_folder_of, local_copies
from hvdtrain.data.pipeline import Augment, map_samples, output_spec, random_access_evaluation, random_access_training
from hvdtrain.data.record_index import RecordIndex, UnreadableRecordError, cached_index, read_record
from hvdtrain.data.sample_plan import SamplePlan, shard_batches
from hvdtrain.data.source import BadSample
from hvdtrain.data.unpacking import is_packed, unpack, unpacked_path, unpacking_error
from hvdtrain.distributed import runtime
from hvdtrain.errors import DataError, UsageError
from hvdtrain.fault_tolerance.collective_errors import on_every_rank, on_first_rank

# The usual limit per process is 1,024; TensorFlow and MPI need some.
_MAX_OPEN_FILES = 256
_MAX_CAUSE_CHARACTERS = 200
_MAX_FILES_SHOWN = 3


@dataclasses.dataclass(frozen=True)
class _File:
    """A file as this rank opened it."""

    path: Path
    size: int
    mtime_ns: int
    readable: Path
    """The file itself, or its unpacked copy."""
    cache_folder: Path


class TFRecords:
    """Samples in TFRecord files, plain or GZIP, which every rank can read.

    Every rank may read any record, so shuffling is as random as with arrays. To allow this, rank 0 scans
    the files once for record offsets and keeps them in the cache folder; GZIP files are unpacked there,
    once per host. Collective: all ranks must create this object, after ``hvdtrain.init()``.

    Args:
        files: a path, a glob pattern, or a list of these; read in sorted order. Those that are URLs of an object store
            are downloaded first, once per host.
        parse: maps a serialized record, a scalar string tensor, to ``(x, y)`` or ``(x, y, sample_weight)``.
        batched: ``parse`` takes a vector of records and returns batches, like ``tf.io.parse_example``;
            several times faster.
        augment: called during training as ``x, y = augment(x, y, seed)`` on single samples. ``seed``, int32
            of shape ``[2]``, is for ``tf.random.stateless_*`` and ``tf.image.stateless_random_*``; it
            depends only on the plan's seed, the epoch and the sample.
        cache_dir: the cache folder (default: the user's; beside the downloaded files if they are URLs).

    Raises:
        UsageError: ``parse`` returns another structure.
        JobError: on every rank, if one finds no file, no record, or files that differ from rank 0's.
    """

    keeps_order = False
    can_change = True

    def __init__(
        self,
        files: str | Path | Sequence[str | Path],
        parse: Callable[[tf.Tensor], tuple[Any, ...]],
        *,
        batched: bool = False,
        augment: Augment | None = None,
        cache_dir: str | Path | None = None,
    ):
        parsed = output_spec(tf.function(parse), tf.TensorSpec([None] if batched else [], tf.string))
        if not isinstance(parsed, tuple) or len(parsed) not in (2, 3):
            raise UsageError(f"parse must return (x, y) or (x, y, sample_weight). Received: {parsed}")
        self._parse = parse
        self._batched = batched
        self._augment = augment
        collectives = runtime.collectives()
        patterns = local_copies([files] if isinstance(files, str | Path) else list(files), collectives)
        self._files = on_every_rank(lambda: _find_files(patterns, cache_dir), collectives)
        on_every_rank(lambda: _unpack(self._files) if collectives.local_rank == 0 else None, collectives)
        indexes = on_first_rank(lambda: _index(self._files), collectives)
        on_every_rank(lambda: _require_indexed(self._files, indexes), collectives)
        self.bad_samples = on_first_rank(lambda: _damaged(self._files, indexes), collectives)
        self._offsets = np.concatenate([index.offsets for index in indexes])
        self._lengths = np.concatenate([index.lengths for index in indexes])
        counts = [len(index.offsets) for index in indexes]
        self._first_numbers = np.cumsum(counts) - counts
        self.num_samples = len(self._offsets)
        # A file evicted from this cache is closed when the last thread releases it.
        self._descriptor = functools.lru_cache(_MAX_OPEN_FILES)(_Descriptor)

    def facts(self) -> dict[str, Any]:
        """The number of samples and a digest of the files' names, sizes and record offsets."""
        digest = hashlib.sha256(self._offsets.tobytes())
        for file in self._files:
            digest.update(f"{file.path.name} {file.size} ".encode())
        return {"samples": self.num_samples, "digest": digest.hexdigest()[:12]}

    def check_unchanged(self) -> None:
        """Raises DataError if a file's size or modification time has changed since it was opened."""
        for file in self._files:
            status = _status(file.path)
            if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime_ns):
                raise DataError(
                    f"files must not change while they are in use. Received: {file.path}, which had {file.size} bytes "
                    f"and now has {status.st_size}. Restart the job to read the new file."
                )

    def find_bad(self, numbers: np.ndarray) -> list[BadSample]:
        """Reads and parses each of these samples separately and returns those that fail."""
        failures = [(int(number), self._failure(int(number))) for number in numbers]
        return [BadSample(number, self._where(number), cause) for number, cause in failures if cause is not None]

    def training_batches(self, plan: SamplePlan, first_micro_batch: int, excluded: frozenset[int]) -> tf.data.Dataset:
        return random_access_training(self._read_augmented, plan, first_micro_batch, excluded)

    def evaluation_batches(
        self, batch_size: int, rank: int, size: int, first_batch: int, excluded: frozenset[int]
    ) -> tf.data.Dataset:
        batches = shard_batches(self.num_samples, batch_size, rank, size, excluded)
        return random_access_evaluation(self._read_parsed, batches, first_batch)

    def _read_parsed(self, numbers: tf.Tensor) -> tuple[Any, ...]:
        serialized = self._serialized(numbers)
        return tf.function(self._parse)(serialized) if self._batched else map_samples(self._parse, serialized)

    def _read_augmented(self, numbers: tf.Tensor, seeds: tf.Tensor) -> tuple[Any, ...]:
        if self._augment is None:
            return self._read_parsed(numbers)
        if self._batched:
            x, y, *weights = self._read_parsed(numbers)
            return (*map_samples(self._augment, x, y, seeds), *weights)

        def sample(serialized: tf.Tensor, seed: tf.Tensor) -> tuple[Any, ...]:
            x, y, *weight = self._parse(serialized)
            x, y = self._augment(x, y, seed)  # type: ignore[misc]
            return (x, y, *weight)

        return map_samples(sample, self._serialized(numbers), seeds)

    def _serialized(self, numbers: tf.Tensor) -> tf.Tensor:
        records = tf.numpy_function(self._read_all, [numbers], tf.string)
        records.set_shape([None])
        return records

    def _read_all(self, numbers: np.ndarray) -> np.ndarray:
        records = np.empty(len(numbers), dtype=object)
        for i, number in enumerate(numbers):
            try:
                records[i] = self._read(number)
            except (UnreadableRecordError, OSError) as error:
                raise DataError(f"{self._where(number)}: {error}") from error
        return records

    def _read(self, number: int) -> bytes:
        descriptor = self._descriptor(self._files[self._file_of(number)].readable)
        return read_record(descriptor.number, int(self._offsets[number]), int(self._lengths[number]))

    def _failure(self, number: int) -> str | None:
        try:
            # Eagerly: an optimized graph may omit the check that fails here, for example that of a reshape.
            with tf.device("CPU"):
                record = self._read(number)
                self._parse(tf.constant([record] if self._batched else record))
        except (UnreadableRecordError, OSError) as error:
            return str(error)
        except (tf.errors.OpError, ValueError) as error:
            return _in_one_line(error)
        return None

    def _file_of(self, number: int) -> int:
        return int(np.searchsorted(self._first_numbers, number, side="right")) - 1

    def _where(self, number: int) -> str:
        file = self._file_of(number)
        return _place(self._files[file], number - self._first_numbers[file], self._offsets[number])


class _Descriptor:
    """A file that is open for reading until it is garbage-collected."""

    def __init__(self, path: Path):
        self.number = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


def _find_files(patterns: Sequence[str | Path], cache_dir: str | Path | None) -> list[_File]:
    if not patterns:
        raise UsageError("files must name at least one file. Received: none")
    paths: set[Path] = set()
    for pattern in patterns:
        # A file name may contain brackets.
        found = [Path(pattern)] if Path(pattern).is_file() else [Path(path) for path in glob.glob(str(pattern))]
        found = [path for path in found if path.is_file()]
        if not found:
            raise DataError(f"files must name at least one file. Received: {pattern}, which matches none")
        paths.update(found)
    return [_open(path, cache_folder_of(path) if cache_dir is None else Path(cache_dir)) for path in sorted(paths)]


def _open(path: Path, cache_folder: Path) -> _File:
    status = _status(path)
    try:
        readable = unpacked_path(path, cache_folder) if is_packed(path) else path
    except OSError as error:
        raise DataError(f"each file must be readable. Received: {path}: {error.strerror}") from error
    return _File(path, status.st_size, status.st_mtime_ns, readable, cache_folder)


def _status(path: Path) -> os.stat_result:
    try:
        return os.stat(path)
    except OSError as error:
        raise DataError(
            f"files must not be moved or deleted while in use. Received: {path}: {error.strerror}"
        ) from error


def _unpack(files: list[_File]) -> None:
    for file in files:
        if file.readable != file.path:
            unpack(file.path, file.readable)


def _index(files: list[_File]) -> list[RecordIndex]:
    indexes = []
    for file in files:
        error = None if file.readable == file.path else unpacking_error(file.readable)
        indexes.append(cached_index(file.path, file.cache_folder, file.readable, error))
    if not any(len(index.offsets) for index in indexes):
        causes = ", ".join(f"{bad.where}: {bad.cause}" for bad in _damaged(files, indexes)[:_MAX_FILES_SHOWN])
        raise DataError(f"there must be at least one record. Received: {causes}")
    return indexes


def _require_indexed(files: list[_File], indexes: list[RecordIndex]) -> None:
    if len(files) != len(indexes):
        raise DataError(
            f"all ranks must find the same files. Received: {len(files)} files from {files[0].path} to "
            f"{files[-1].path} on this rank, {len(indexes)} on rank 0"
        )
    for file, index in zip(files, indexes, strict=True):
        size = _status(file.readable).st_size
        if size != index.file_bytes:
            raise DataError(
                f"all ranks must find the same files. Received: {file.path} with {size} bytes on this rank, "
                f"{index.file_bytes} on rank 0 (unpacked, if it is a GZIP file)"
            )


def _damaged(files: list[_File], indexes: list[RecordIndex]) -> list[BadSample]:
    return [
        BadSample(-1, _place(file, len(index.offsets), index.damage.offset_bytes), index.damage.cause)
        for file, index in zip(files, indexes, strict=True)
        if index.damage is not None
    ]


def _place(file: _File, record: int, offset: int) -> str:
    unpacked = "" if file.readable == file.path else " of the unpacked data"
    return f"{file.path}, record {record} at offset {offset} bytes{unpacked}"


def _in_one_line(error: Exception) -> str:
    """An error's message in one line, without the op names that TensorFlow adds."""
    message = error.message if isinstance(error, tf.errors.OpError) else str(error)
    plain = re.sub(r"\{\{.*?\}\}|\[Op:.*", "", message).strip()
    return textwrap.shorten(plain.splitlines()[0] if plain else type(error).__name__, _MAX_CAUSE_CHARACTERS)
