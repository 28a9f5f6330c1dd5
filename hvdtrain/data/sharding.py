"""``hvdtrain.shard``: each rank's part of arrays and data sets, with equal numbers of steps on all ranks."""

from typing import Any

import keras
import tensorflow as tf

from hvdtrain.data import kept_order, sharded_order
from hvdtrain.distributed import runtime
from hvdtrain.distributed.untuned_datasets import without_autotuning
from hvdtrain.errors import DataError, UsageError
from hvdtrain.optim.values_of_parts import note_parts


def shard(*data: Any, drop_remainder: bool = True) -> Any:
    """This rank's part of the data, for ``model.fit`` and your own loops; all ranks get the same number of elements.

    ``x, y = hvdtrain.shard(x, y)`` and ``dataset = hvdtrain.shard(dataset)``. Rank r takes the elements r, r + size,
    r + 2 * size, …, so that the ranks' batches of a step together are the batch of one process. Nothing is copied.

    Args:
        data: arrays, or structures (dict, tuple, list) of arrays, with the same number of samples: NumPy arrays and
            memory maps, tensors (also ragged and sparse ones), pandas' frames, sparse matrices of scipy, and whatever
            else has a length and can be sliced, such as a ``MapDataset`` of Grain. Or one ``tf.data.Dataset``, the same
            on every rank: of single samples, before ``batch``. One of batches is sharded by batch, and the last batch
            may be smaller on one rank. Or one ``keras.utils.PyDataset``, which is sharded by batch.
        drop_remainder: leave out the last ``n % size`` elements, because ranks that train must make the same number of
            steps. False for ``validation_data``: with ``hvdtrain.callbacks.distributed``, values are exact on parts of
            different lengths.

    Returns:
        The part of ``data``, or a tuple of parts if there are several.

    Raises:
        DataError: arrays differ in their number of samples, or there are fewer than ranks.
        UsageError: the data cannot be sharded, or it is shuffled without a seed or sharded already, so that ranks
            would not see all of it. (Other differences in order are found when training begins.)
    """
    topology = runtime.current().topology
    if topology.size > 1:
        sharded_order.note(data)
    parts = shard_of(data, topology.rank, topology.size, drop_remainder=drop_remainder)
    if topology.size > 1:
        note_parts(parts)
    return parts if len(parts) > 1 else parts[0]


def shard_of(data: tuple[Any, ...], rank: int, size: int, *, drop_remainder: bool) -> tuple[Any, ...]:
    """As :func:`shard`, for a given rank."""
    datasets = [each for each in data if isinstance(each, tf.data.Dataset | keras.utils.PyDataset)]
    if datasets and len(data) > 1:
        raise UsageError(f"a data set must be sharded alone: it contains the targets. Received: {len(data)} arguments.")
    if not data:
        raise UsageError("shard needs data. Received: nothing.")
    if not datasets:
        return _shard_of_arrays(data, rank, size, drop_remainder)
    if isinstance(datasets[0], tf.data.Dataset):
        return (without_autotuning(_shard_of_dataset(datasets[0], rank, size, drop_remainder)),)
    return (_PyDatasetShard(datasets[0], rank, size, drop_remainder),)


def _shard_of_arrays(data: tuple[Any, ...], rank: int, size: int, drop_remainder: bool) -> tuple[Any, ...]:
    # Sparse matrices of scipy have rows in this format only.
    data = tf.nest.map_structure(lambda each: each.tocsr() if hasattr(each, "tocsr") else each, data)
    arrays = [each for each in tf.nest.flatten(data) if each is not None]
    for each in arrays:
        if isinstance(each, tf.SparseTensor):
            continue
        if isinstance(each, str | bytes) or not hasattr(each, "__getitem__") or not getattr(each, "shape", (1,)):
            raise UsageError(
                "shard needs arrays, structures of them, a tf.data.Dataset or a PyDataset. Received: "
                f"{type(each).__name__}. Wrap a generator in tf.data.Dataset.from_generator."
            )
    # Sparse matrices and ragged tensors have no len().
    lengths = {int(each.shape[0]) if hasattr(each, "shape") else len(each) for each in arrays}
    if len(lengths) != 1:
        raise DataError(f"all arrays must have equally many samples. Received: {sorted(lengths)}")
    (length,) = lengths
    _require_enough(length, size)
    usable = length // size * size if drop_remainder else length

    def part(array: Any) -> Any:
        if isinstance(array, tf.SparseTensor):
            return _rows_of_sparse(array, rank, usable, size)
        return None if array is None else getattr(array, "iloc", array)[rank:usable:size]

    return tf.nest.map_structure(part, data)


def _rows_of_sparse(tensor: tf.SparseTensor, rank: int, usable: int, size: int) -> tf.SparseTensor:
    """The rows ``[rank:usable:size]``."""
    rows = tensor.indices[:, 0]
    kept = tf.sparse.retain(tensor, (rows % size == rank) & (rows < usable))
    indices = tf.concat([kept.indices[:, :1] // size, kept.indices[:, 1:]], axis=1)
    return tf.SparseTensor(indices, kept.values, [len(range(rank, usable, size)), *tensor.shape[1:]])


def _shard_of_dataset(dataset: tf.data.Dataset, rank: int, size: int, drop_remainder: bool) -> tf.data.Dataset:
    if size > 1:
        dataset = kept_order.in_order(dataset)
        kept_order.note_shard(dataset)
    length = int(dataset.cardinality())
    if length >= 0:
        _require_enough(length, size)
        usable = dataset.take(length // size * size if drop_remainder else length)
        return sharded_order.shard_without_note(usable, size, rank)
    if length == tf.data.INFINITE_CARDINALITY or not drop_remainder:
        return sharded_order.shard_without_note(dataset, size, rank)

    def one_of(*group: Any) -> tf.data.Dataset:
        return tf.data.Dataset.zip(group if len(group) > 1 else group[0]).skip(rank).take(1)

    # The length is unknown: take one element from each complete group of ``size`` elements.
    return dataset.window(size, drop_remainder=True).flat_map(one_of)


class _PyDatasetShard(keras.utils.PyDataset):
    """Every ``size``-th batch of a PyDataset."""

    def __init__(self, dataset: keras.utils.PyDataset, rank: int, size: int, drop_remainder: bool):
        super().__init__(dataset.workers, dataset.use_multiprocessing, dataset.max_queue_size)
        self._dataset = dataset
        self._rank = rank
        self._size = size
        self._missing = size - 1 if drop_remainder else rank
        if dataset.num_batches is not None:
            _require_enough(dataset.num_batches, size)

    @property
    def num_batches(self) -> int | None:
        total: int | None = self._dataset.num_batches
        return None if total is None else (total - 1 - self._missing) // self._size + 1

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index * self._size + self._rank]

    def on_epoch_begin(self) -> None:
        self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._dataset.on_epoch_end()
        sharded_order.note_end_of_epoch(self._dataset)


def _require_enough(length: int, size: int) -> None:
    if length < size:
        raise DataError(
            f"there must be at least one element for each rank. Received: {length} for {size} ranks. Use fewer ranks "
            "or more data."
        )
