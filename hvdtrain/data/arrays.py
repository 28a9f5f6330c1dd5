"""Samples in arrays, in memory or memory-mapped."""

import functools
import hashlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.data.numbered import NumberedSource, Parts, read_with_numpy
from hvdtrain.data.pipeline import Augment
from hvdtrain.errors import DataError, UsageError

# Smaller arrays are copied into tensors, which are faster to read (by 0.2 ms a batch); larger copies take too much
# memory.
_MAX_COPIED_BYTES = 64 << 20
_STRINGS = "OSU"


class Arrays(NumberedSource):
    """Samples in arrays.

    Large arrays are not copied, and memory-mapped ones (``np.load(…, mmap_mode="r")``) are read batch by batch.

    Args:
        x: the inputs: an array, or a structure (dict, tuple, list) of arrays of shape ``[num_samples, …]``, of numbers
            or strings. The rows of scipy's sparse matrices become dense when they are read.
        y: the targets, likewise; None for models that train on x alone.
        sample_weight: shape ``[num_samples]``; None weights all samples equally.
        augment: called during training as ``x, y = augment(x, y, seed)`` on single samples. ``seed``, int32
            of shape ``[2]``, is for ``tf.random.stateless_*`` and ``tf.image.stateless_random_*``; it
            depends only on the plan's seed, the epoch and the sample.

    Raises:
        DataError: the arrays differ in their number of samples, or hold neither numbers nor strings.
        UsageError: there are weights without targets.
    """

    def __init__(self, x: Any, y: Any = None, sample_weight: Any = None, *, augment: Augment | None = None):
        super().__init__(augment)
        if y is None and sample_weight is not None:
            raise UsageError("sample_weight needs y, the targets that it weights. Received: sample_weight without y.")
        self.x = _as_arrays(x)
        self.y = None if y is None else _as_arrays(y)
        self._parts: Parts = (self.x,) if y is None else (self.x, self.y)
        if sample_weight is not None:
            self._parts += (np.asarray(sample_weight, keras.config.floatx()),)
        self._arrays: list[Any] = tf.nest.flatten(self._parts)
        sizes = {len(array) if array.ndim else 0 for array in self._arrays}
        if len(sizes) != 1 or 0 in sizes:
            shapes = [array.shape for array in self._arrays]
            raise DataError(f"all arrays must hold the same number of samples, at least 1. Received shapes: {shapes}")
        self.num_samples = sizes.pop()

    def facts(self) -> dict[str, Any]:
        """The number of samples and a digest of up to 1,000 of them."""
        numbers = np.unique(np.linspace(0, self.num_samples - 1, 1000).astype(np.int64))
        digest = hashlib.sha256()
        for array in self._arrays:
            digest.update(f"{array.dtype} {array.shape}".encode())
            digest.update(_content(array[numbers]))
        return {"samples": self.num_samples, "digest": digest.hexdigest()[:12]}

    @functools.cached_property
    def _tensors(self) -> list[tf.Tensor | None]:
        """The arrays that are copied into tensors; None for those that are read in place."""
        copies_all = sum(array.nbytes for array in self._arrays if _is_in_memory(array)) <= _MAX_COPIED_BYTES
        # Datasets capture these tensors by reference, so the arrays are copied once, not per dataset. init_scope keeps
        # them out of the graph that is being traced when they are first used. Input runs on the CPU: GPU memory is for
        # the model.
        with tf.init_scope(), tf.device("CPU"):
            return [
                tf.constant(array) if array.dtype.kind in _STRINGS or (copies_all and _is_in_memory(array)) else None
                for array in self._arrays
            ]

    def _read(self, numbers: tf.Tensor) -> Parts:
        tensors = self._tensors
        in_place = [array for array, tensor in zip(self._arrays, tensors, strict=True) if tensor is None]
        specs = [tf.TensorSpec((None, *array.shape[1:]), array.dtype) for array in in_place]
        # Whole rows at once: NumPy reads only these of a memory map.
        rows = read_with_numpy(lambda batch: [np.asarray(array[batch]) for array in in_place], numbers, specs)
        remaining = iter(rows)
        flat = [next(remaining) if tensor is None else tf.gather(tensor, numbers) for tensor in tensors]
        return tf.nest.pack_sequence_as(self._parts, flat)


class _SparseRows:
    """A sparse matrix of scipy, indexed as an array."""

    ndim = 2

    def __init__(self, matrix: Any):
        self._matrix = matrix.tocsr()
        self.dtype: np.dtype = matrix.dtype
        self.shape: tuple[int, ...] = matrix.shape

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, numbers: np.ndarray) -> np.ndarray:
        rows: np.ndarray = self._matrix[numbers].toarray()
        return rows


def _is_in_memory(array: Any) -> bool:
    return isinstance(array, np.ndarray) and not isinstance(array, np.memmap)


def _as_arrays(structure: Any) -> Any:
    # As in Keras: tf.data would stack the arrays of a list.
    return keras.tree.lists_to_tuples(tf.nest.map_structure(_as_array, structure))


def _as_array(array: Any) -> Any:
    if hasattr(array, "tocsr"):
        return _SparseRows(array)
    if isinstance(array, tf.RaggedTensor | tf.SparseTensor):
        raise DataError(
            f"arrays must have rows of one shape. Received: {type(array).__name__}. Pass a tf.data.Dataset "
            "(tf.data.Dataset.from_tensor_slices)."
        )
    # np.asarray would return a memory map as an ordinary array.
    array = array if isinstance(array, np.memmap) else np.asarray(array)
    if array.dtype.kind not in "biufcV" and not _holds_strings(array):
        raise DataError(
            f"arrays must hold numbers or strings. Received: dtype {array.dtype}, first element "
            f"{array.ravel()[0]!r:.50}. Convert them, for example with numpy.stack."
        )
    return array


def _holds_strings(array: np.ndarray) -> bool:
    return array.dtype.kind in "SU" or all(isinstance(each, str | bytes) for each in array.ravel())


def _content(rows: np.ndarray) -> bytes:
    # Objects are pointers, which differ between ranks.
    if rows.dtype.kind == "O":
        return bytes(tf.io.serialize_tensor(tf.constant(rows)).numpy())
    return np.ascontiguousarray(rows).tobytes()
