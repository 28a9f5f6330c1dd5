"""Sharded, deterministic input."""

import hashlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.errors import DataError
from hvdtrain.sampling import SamplePlan, shard


class Arrays:
    """Samples held in memory.

    Args:
        x: the inputs: an array, or a structure (dict, tuple) of arrays of shape ``[num_samples, …]``.
        y: the targets, likewise.
        sample_weight: shape ``[num_samples]``; None: every sample counts the same.

    Raises:
        DataError: the arrays differ in their number of samples.
    """

    def __init__(self, x: Any, y: Any, sample_weight: Any = None):
        self._x = tf.nest.map_structure(np.asarray, x)
        self._y = tf.nest.map_structure(np.asarray, y)
        self._sample_weight = None if sample_weight is None else np.asarray(sample_weight, dtype=np.float32)
        arrays = tf.nest.flatten((self._x, self._y))
        if self._sample_weight is not None:
            arrays.append(self._sample_weight)
        sizes = {len(array) if array.ndim else 0 for array in arrays}
        if len(sizes) != 1 or 0 in sizes:
            shapes = [array.shape for array in arrays]
            raise DataError(f"all arrays must hold the same number of samples, at least 1. Received shapes: {shapes}")
        self.num_samples = sizes.pop()

    def facts(self) -> dict[str, Any]:
        """What must be the same on every rank: the number of samples and a digest of up to 1,000 of them."""
        numbers = np.unique(np.linspace(0, self.num_samples - 1, 1000).astype(np.int64))
        digest = hashlib.sha256()
        for array in tf.nest.flatten((self._x, self._y)):
            digest.update(f"{array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array[numbers]).tobytes())
        return {"samples": self.num_samples, "digest": digest.hexdigest()[:12]}

    def batch_reader(self) -> Callable[[tf.Tensor], tuple[Any, Any, tf.Tensor | None]]:
        """A function from sample numbers, shape ``[batch]``, to ``(x, y, sample_weight)``; it works in a graph."""
        # Tensors are captured by reference: the arrays are copied once, not with every epoch.
        x, y = tf.nest.map_structure(tf.constant, (self._x, self._y))
        weight = None if self._sample_weight is None else tf.constant(self._sample_weight)

        def read(numbers: tf.Tensor) -> tuple[Any, Any, tf.Tensor | None]:
            taken = tf.nest.map_structure(lambda array: tf.gather(array, numbers), (x, y))
            return taken[0], taken[1], None if weight is None else tf.gather(weight, numbers)

        return read


def training_dataset(source: Arrays, plan: SamplePlan, *, first_step: int = 0) -> tf.data.Dataset:
    """The micro-batches of one rank, epoch after epoch without end, from global step ``first_step`` on.

    Elements are ``(x, y, sample_weight)``. Weights are 1 but for the last step of an epoch (see
    :class:`~hvdtrain.sampling.SamplePlan`), times the source's own.
    """
    read = source.batch_reader()
    starts, counts, weights = plan.epoch_slices()
    first_epoch, skipped_steps = divmod(first_step, plan.steps_per_epoch)

    def one_epoch(epoch: tf.Tensor) -> tf.data.Dataset:
        order = tf.numpy_function(lambda number: plan.order(int(number)), [epoch], tf.int64)
        order.set_shape([plan.num_samples])
        slices = tf.data.Dataset.from_tensor_slices((starts, counts, weights))
        return slices.map(lambda start, count, weight: (order[start : start + count], weight))

    def batch(numbers: tf.Tensor, weight: tf.Tensor) -> tuple[Any, Any, tf.Tensor]:
        x, y, sample_weight = read(numbers)
        weights = tf.cast(tf.fill(tf.shape(numbers), weight), keras.config.floatx())
        return x, y, weights if sample_weight is None else weights * tf.cast(sample_weight, weights.dtype)

    epochs = tf.data.Dataset.range(first_epoch, np.iinfo(np.int64).max)
    dataset = epochs.flat_map(one_epoch).skip(skipped_steps * plan.accumulate)
    return _with_options(dataset.map(batch))


def evaluation_dataset(source: Arrays, batch_size: int, rank: int, size: int) -> tf.data.Dataset:
    """One rank's share of the samples, each once over all ranks, in batches ``(x, y[, sample_weight])``."""
    read = source.batch_reader()
    mine = shard(source.num_samples, rank, size)

    def batch(numbers: tf.Tensor) -> tuple[Any, ...]:
        x, y, sample_weight = read(numbers)
        return (x, y) if sample_weight is None else (x, y, sample_weight)

    return _with_options(tf.data.Dataset.range(mine.start, mine.stop).batch(batch_size).map(batch))


def _with_options(dataset: tf.data.Dataset) -> tf.data.Dataset:
    options = tf.data.Options()
    options.deterministic = True
    # The input is sharded by sample number already.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return dataset.with_options(options).prefetch(2)
