"""Samples in TFRecord files."""

import functools
import os
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.data.bad_samples import BadSample
from hvdtrain.data.downloads import local_copies
from hvdtrain.data.pipeline import Augment, map_samples, output_spec, random_access_evaluation, random_access_training
from hvdtrain.data.record_files import RecordFile, find_files, require_unchanged, status_of, to_check
from hvdtrain.data.record_index import UnreadableRecordError, read_record
from hvdtrain.data.record_table import open_table
from hvdtrain.data.sample_draws import SampleDraws
from hvdtrain.distributed import runtime
from hvdtrain.errors import DataError, UsageError
from hvdtrain.fault_tolerance.collective_errors import on_every_rank
from hvdtrain.system import error_text

# The usual limit per process is 1,024; TensorFlow and MPI need some.
_MAX_OPEN_FILES = 256
_MAX_CAUSE_CHARACTERS = 200
_MAX_FILES_SHOWN = 3


class TFRecords:
    """Samples in TFRecord files, plain or GZIP, which every rank can read.

    Every rank may read any record, so shuffling is as random as with arrays. To allow this, the ranks of the first host
    scan the files once for record offsets and keep them in the cache folder; GZIP files are unpacked there, once per
    host. Collective: all ranks must create this object, after ``hvdtrain.init()``.

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
        self._files = find_files(patterns, cache_dir, collectives)
        self._checked = to_check(len(self._files), collectives.rank, collectives.size)
        self._table = open_table(self._files, collectives)
        self.num_samples = self._table.files.num_records
        on_every_rank(self._require_records, collectives)
        self.bad_samples = [self._damaged(file) for file in self._table.files.damage]
        # A file evicted from this cache is closed when the last thread releases it.
        self._descriptor = functools.lru_cache(_MAX_OPEN_FILES)(_Descriptor)

    def facts(self) -> dict[str, Any]:
        """The number of samples and a digest of the files' names, sizes and record offsets."""
        digest = self._table.digest()
        for file in self._files:
            digest.update(f"{file.path.name} {file.size} ".encode())
        return {"samples": self.num_samples, "digest": digest.hexdigest()[:12]}

    def check_unchanged(self) -> None:
        """Raises DataError if a file's size or modification time has changed since it was opened.

        In jobs with very many files and ranks, each rank checks some of the files.
        """
        require_unchanged([self._files[i] for i in self._checked])

    def find_bad(self, numbers: np.ndarray) -> list[BadSample]:
        """Reads and parses each of these samples separately and returns those that fail."""
        failures = [(int(number), self._failure(int(number))) for number in numbers]
        return [BadSample(number, self._where(number), cause) for number, cause in failures if cause is not None]

    def training_batches(self, draws: SampleDraws) -> tf.data.Dataset:
        return random_access_training(self._read_augmented, draws)

    def evaluation_batches(self, draw: Callable[[], list[np.ndarray]]) -> tf.data.Dataset:
        return random_access_evaluation(self._read_parsed, draw)

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
        file, offset, length = self._table.place_of(number)
        # Held until the record is read: other threads may evict it.
        descriptor = self._descriptor(self._files[file].readable)
        return read_record(descriptor.number, offset, length)

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

    def _where(self, number: int) -> str:
        file, offset, _ = self._table.place_of(number)
        return _place(self._files[file], number - int(self._table.files.first_numbers[file]), offset)

    def _damaged(self, file: int) -> BadSample:
        offset, cause = self._table.files.damage[file]
        return BadSample(-1, _place(self._files[file], int(self._table.files.counts[file]), offset), cause)

    def _require_records(self) -> None:
        files, sizes = self._files, self._table.files.sizes
        if not self.num_samples:
            bad = map(self._damaged, list(self._table.files.damage)[:_MAX_FILES_SHOWN])
            causes = ", ".join(f"{each.where}: {each.cause}" for each in bad)
            raise DataError(f"there must be at least one record. Received: {causes}")
        if len(files) != len(sizes):
            raise DataError(
                f"all ranks must find the same files. Received: {len(files)} files from {files[0].path} to "
                f"{files[-1].path} on this rank, {len(sizes)} on rank 0"
            )
        for i in self._checked:
            size = status_of(files[i].readable).st_size
            if size != sizes[i]:
                raise DataError(
                    f"all ranks must find the same files. Received: {files[i].path} with {size} bytes on this rank, "
                    f"{sizes[i]} on rank 0 (unpacked, if it is a GZIP file)"
                )


class _Descriptor:
    """A file that is open for reading until it is garbage-collected."""

    def __init__(self, path: Path):
        self.number = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


def _place(file: RecordFile, record: int, offset: int) -> str:
    unpacked = " of the unpacked data" if file.is_packed else ""
    return f"{file.path}, record {record} at offset {offset} bytes{unpacked}"


def _in_one_line(error: Exception) -> str:
    return textwrap.shorten(error_text.message(error) or type(error).__name__, _MAX_CAUSE_CHARACTERS)
