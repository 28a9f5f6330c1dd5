"""Samples of any object with a length and an index: one by one, or in the batches of a PyDataset."""

import functools
import hashlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.data.bad_samples import BadSample
from hvdtrain.data.conversion import common_dtype, converted
from hvdtrain.data.numbered import NumberedSource, Parts, read_with_numpy
from hvdtrain.data.pipeline import Augment
from hvdtrain.errors import DataError, UsageError

_SAMPLES_COMPARED = 16
_BATCHES_KEPT = 4


class RandomAccess(NumberedSource):
    """Samples of an object with ``len(samples)`` and ``samples[number]``.

    Each rank reads its share, batch by batch, on background threads, one call at a time. An unreadable sample is
    skipped up to the quota of ``bad_samples``.

    Args:
        samples: the same on every rank. ``samples[number]`` returns x, ``(x, y)`` or ``(x, y, sample_weight)``, all
            samples with the same structure, shapes and dtypes.
        select: converts what ``samples[number]`` returns, for instance the dict of TensorFlow Datasets'
            ``tfds.data_source``, to x, ``(x, y)`` or ``(x, y, sample_weight)``; None: no conversion.
        augment: as for :class:`~hvdtrain.data.Arrays`.

    Raises:
        DataError: there are no samples, or the first one cannot be read.
        UsageError: it has no length, or samples are tuples of another length.
    """

    def __init__(self, samples: Any, *, select: Callable[[Any], Any] | None = None, augment: Augment | None = None):
        super().__init__(augment)
        if not hasattr(samples, "__len__") or not hasattr(samples, "__getitem__"):
            raise UsageError(
                f"samples must have a length and an index. Received: {type(samples).__name__}. For a tf.data.Dataset, "
                "use hvdtrain.data.Stream."
            )
        self._samples = samples
        self._select = select or (lambda sample: sample)
        self._lock = threading.Lock()
        self.num_samples = len(samples)
        if self.num_samples == 0:
            raise DataError("there must be at least one sample. Received: none")
        try:
            self._structure = _parts_of(self._select(samples[0]))
        except (OSError, ValueError) as error:
            raise DataError(
                "the first sample must be readable: it shows shapes and dtypes. Received: "
                f"{type(error).__name__}: {error}"
            ) from error
        self._specs = _specs_of(self._structure)
        # Perhaps only some of them have decimals.
        others = map(self._specs_if_readable, self._compared()[1:])
        self._specs = _with_common_dtypes(self._specs, [each for each in others if each is not None])

    def _specs_if_readable(self, number: int) -> list[tf.TensorSpec] | None:
        try:
            return _specs_of(_parts_of(self._select(self._samples[number])))
        except Exception:  # Counted when it is read for training.
            return None

    def _compared(self) -> list[int]:
        return [int(each) for each in np.unique(np.linspace(0, self.num_samples - 1, _SAMPLES_COMPARED).astype(int))]

    def facts(self) -> dict[str, Any]:
        """The number of samples and a digest of 16 of them."""
        numbers = self._compared()
        readable = set(numbers) - {each.number for each in self.find_bad(np.array(numbers))}
        return {"samples": self.num_samples, "digest": _digest(self._one(number) for number in sorted(readable))}

    def find_bad(self, numbers: np.ndarray) -> list[BadSample]:
        """Reads each of these samples separately and returns those that fail."""
        bad = []
        for number in map(int, numbers):
            try:
                self._one(number)
            except Exception as error:
                bad.append(BadSample(number, f"sample {number}", f"{type(error).__name__}: {error}"))
        return bad

    def _one(self, number: int) -> list[np.ndarray]:
        with self._lock:
            sample = _parts_of(self._select(self._samples[number]))
        tf.nest.assert_same_structure(self._structure, sample)
        flat = _arrays(sample, self._specs, f"sample {number}")
        for each, spec in zip(flat, self._specs, strict=True):
            if not spec.shape.is_compatible_with(each.shape):
                raise DataError(
                    f"all samples must have the same shapes. Received: {each.shape} in sample {number}, {spec.shape} "
                    "in the first"
                )
        return flat

    def _read(self, numbers: tf.Tensor) -> Parts:
        def read(batch: np.ndarray) -> list[np.ndarray]:
            columns = zip(*(self._one(int(number)) for number in batch), strict=True)
            return [np.stack(column) for column in columns]

        specs = [tf.TensorSpec((None, *spec.shape), spec.dtype) for spec in self._specs]
        return tf.nest.pack_sequence_as(self._structure, read_with_numpy(read, numbers, specs))


class Batches(NumberedSource):
    """The samples of a ``keras.utils.PyDataset``, in its order.

    A sample's number is its place in the sequence of batches. Each rank reads the batches that hold its samples;
    several ranks may read the same batch.

    Args:
        dataset: the same on every rank; all batches but the last have the same size.

    Raises:
        DataError: it has no batches, or they have different sizes.
        UsageError: it is endless, or changes between epochs.
    """

    keeps_order = True

    def __init__(self, dataset: keras.utils.PyDataset):
        super().__init__()
        kind = type(dataset)
        for hook in ("on_epoch_begin", "on_epoch_end"):
            if getattr(kind, hook) is not getattr(keras.utils.PyDataset, hook):
                raise UsageError(
                    f"a PyDataset must yield the same batches in every epoch. Received: {kind.__name__}, which has "
                    f"{hook}. Pass single samples through hvdtrain.data.RandomAccess, which shuffles them."
                )
        if dataset.num_batches is None:
            raise UsageError(f"a PyDataset must have a length. Received: {kind.__name__} without one.")
        if dataset.num_batches == 0:
            raise DataError(f"a PyDataset must have at least one batch. Received: {kind.__name__} without any.")
        self._dataset = dataset
        self._lock = threading.Lock()
        self._batch = functools.lru_cache(_BATCHES_KEPT)(self._read_batch)
        first, last = _parts_of(dataset[0]), _parts_of(dataset[dataset.num_batches - 1])
        self._structure = first
        self._specs = [
            tf.TensorSpec((None, *spec.shape[1:]), spec.dtype)
            for spec in _with_common_dtypes(_specs_of(first), [_specs_of(last)])
        ]
        self._batch_size = len(tf.nest.flatten(first)[0])
        self.num_samples = (dataset.num_batches - 1) * self._batch_size + len(tf.nest.flatten(last)[0])

    def facts(self) -> dict[str, Any]:
        """The number of samples and a digest of the first and the last batch."""
        batches = (self._batch(i) for i in (0, self._dataset.num_batches - 1))
        return {"samples": self.num_samples, "digest": _digest(batches)}

    def _read_batch(self, index: int) -> list[np.ndarray]:
        arrays = _arrays(_parts_of(self._dataset[index]), self._specs, f"batch {index}")
        expected = min(self._batch_size, self.num_samples - index * self._batch_size)
        if {len(each) for each in arrays} != {expected}:
            raise DataError(
                f"all batches of a PyDataset but the last must have the same size. Received: {len(arrays[0])} samples "
                f"in batch {index}, {self._batch_size} in the first"
            )
        return arrays

    def _read(self, numbers: tf.Tensor) -> Parts:
        def read(batch: np.ndarray) -> list[np.ndarray]:
            indices, places = np.divmod(batch, self._batch_size)
            with self._lock:
                pieces = [
                    [array[places[indices == index]] for array in self._batch(int(index))]
                    for index in np.unique(indices)
                ]
            return [np.concatenate(column) for column in zip(*pieces, strict=True)]

        return tf.nest.pack_sequence_as(self._structure, read_with_numpy(read, numbers, self._specs))


def _parts_of(sample: Any) -> Parts:
    parts = sample if isinstance(sample, tuple) else (sample,)
    if len(parts) not in (1, 2, 3):
        raise UsageError(
            f"a sample must be x, (x, y) or (x, y, sample_weight). Received: a tuple of {len(parts)}. Put several "
            "inputs into a list or dict."
        )
    parts = keras.tree.lists_to_tuples(parts)  # As in Keras: tf.data would stack the arrays of a list.
    return parts


def _specs_of(parts: Parts) -> list[tf.TensorSpec]:
    return [tf.type_spec_from_value(tf.constant(each)) for each in tf.nest.flatten(parts)]


def _with_common_dtypes(specs: list[tf.TensorSpec], others: Sequence[list[tf.TensorSpec]]) -> list[tf.TensorSpec]:
    """The specs, with data types that hold those of other samples of the same structure too."""
    found = []
    for i, spec in enumerate(specs):
        dtypes = [spec.dtype, *(each[i].dtype for each in others if len(each) == len(specs))]
        is_numeric = all(each.is_floating or each.is_integer for each in dtypes)
        common = common_dtype([np.dtype(each.as_numpy_dtype) for each in dtypes]) if is_numeric else spec.dtype
        found.append(tf.TensorSpec(spec.shape, tf.as_dtype(common)))
    return found


def _arrays(parts: Parts, specs: Sequence[tf.TensorSpec], what: str) -> list[np.ndarray]:
    flat = tf.nest.flatten(parts)
    return [converted(each, spec.dtype.as_numpy_dtype, what) for each, spec in zip(flat, specs, strict=True)]


def _digest(samples: Any) -> str:
    digest = hashlib.sha256()
    for sample in samples:
        for each in sample:
            digest.update(tf.io.serialize_tensor(tf.constant(each)).numpy())
    return digest.hexdigest()[:12]
