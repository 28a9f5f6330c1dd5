"""The input of one rank as a tf.data.Dataset, and how it is made where samples can be read in any order."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain import process
from hvdtrain.data.source import Source
from hvdtrain.errors import DataError, UsageError
from hvdtrain.sampling import SamplePlan, leave_out

Augment = Callable[[Any, Any, tf.Tensor], tuple[Any, Any]]
"""From one sample's x, y and an int32 seed, shape ``[2]``, to its new x and y."""


def training_dataset(
    source: Source, plan: SamplePlan, *, first_micro_batch: int = 0, excluded: frozenset[int] = frozenset()
) -> tf.data.Dataset:
    """The micro-batches of one rank, epoch after epoch without end.

    Elements are ``(data, factor)``: ``data`` is ``(x, y)``, or ``(x, y, sample_weight)`` if the source
    has sample weights; ``factor``, a scalar of Keras' ``floatx``, is what this rank's mean loss over
    the micro-batch counts for (see :class:`~hvdtrain.sampling.Slice`).

    Args:
        first_micro_batch: where to begin: the micro-batch of this rank, counted across epochs.
        excluded: numbers of samples to leave out. The factor shrinks with the batch; where nothing is
            left, it is 0 and the batch another sample.

    Raises:
        UsageError: the plan shuffles a source that keeps its own order.
        DataError: no sample is left.
    """
    assert plan.num_samples == source.num_samples
    if source.keeps_order and plan.shuffle:
        raise UsageError(
            "the plan must have shuffle=False: this source has an order of its own. Received: shuffle=True"
        )
    _require_some(source, excluded)
    return _run_ahead(source.training_batches(plan, first_micro_batch, excluded))


def evaluation_dataset(
    source: Source,
    batch_size: int,
    rank: int,
    size: int,
    *,
    first_batch: int = 0,
    excluded: frozenset[int] = frozenset(),
) -> tf.data.Dataset:
    """One rank's share of the samples, each once over all ranks, in batches ``(x, y[, sample_weight])``.

    The batches hold the samples of :func:`~hvdtrain.sampling.shard_batches`.

    Args:
        first_batch: batches to leave out at the beginning.
        excluded: numbers of samples to leave out; a batch that has no other does not come.

    Raises:
        DataError: no sample is left.
    """
    _require_some(source, excluded)
    return _run_ahead(source.evaluation_batches(batch_size, rank, size, first_batch, excluded))


def random_access_training(
    read: Callable[[tf.Tensor, tf.Tensor], tuple[Any, ...]],
    plan: SamplePlan,
    first_micro_batch: int,
    excluded: frozenset[int],
) -> tf.data.Dataset:
    """Micro-batches from a function of sample numbers, shape ``[batch]``, and augmentation seeds, ``[batch, 2]``."""
    slices = plan.epoch_slices()
    first_epoch, skipped = divmod(first_micro_batch, len(slices[0]))

    def draw(epoch: np.int64) -> tuple[Any, ...]:
        order = plan.order(int(epoch))
        drawn = leave_out(excluded, order, *slices) if excluded else (order, *slices)
        return (plan.epoch_seed(int(epoch)), *drawn)

    @without_autograph
    def one_epoch(epoch: tf.Tensor) -> tf.data.Dataset:
        dtypes = [tf.int32, tf.int64, tf.int64, tf.int64, tf.float64]
        seed, order, starts, counts, weights = tf.numpy_function(draw, [epoch], dtypes)
        for vector in (order, starts, counts, weights):
            vector.set_shape([None])
        seed.set_shape([])
        parts = tf.data.Dataset.from_tensor_slices((starts, counts, weights))
        return parts.map(without_autograph(lambda start, count, weight: (seed, order[start : start + count], weight)))

    @without_autograph
    def micro_batch(seed: tf.Tensor, numbers: tf.Tensor, weight: tf.Tensor) -> tuple[tuple[Any, ...], tf.Tensor]:
        seeds = tf.stack([tf.fill(tf.shape(numbers), seed), tf.cast(numbers, tf.int32)], axis=1)
        return read(numbers, seeds), tf.cast(weight, keras.config.floatx())

    epochs = tf.data.Dataset.range(first_epoch, np.iinfo(np.int64).max)
    return epochs.flat_map(one_epoch).skip(skipped).map(micro_batch, num_parallel_calls=parallel_calls())


def random_access_evaluation(
    read: Callable[[tf.Tensor], tuple[Any, ...]], batches: list[np.ndarray], first_batch: int
) -> tf.data.Dataset:
    """Batches from a function of sample numbers, shape ``[batch]``."""
    numbers = tf.constant(np.concatenate([np.zeros(0, np.int64), *batches]))
    counts = np.array([len(batch) for batch in batches], dtype=np.int64)
    ends = np.cumsum(counts)
    parts = tf.data.Dataset.from_tensor_slices((ends - counts, ends)).skip(first_batch)
    batch = without_autograph(lambda start, end: read(numbers[start:end]))
    return parts.map(batch, num_parallel_calls=parallel_calls())


def without_autograph(function: Callable[..., Any]) -> Callable[..., Any]:
    """For functions of this project: AutoGraph takes a fifth of a second of a start, and finds nothing to convert.

    A user's function in it has to be a ``tf.function``, which AutoGraph converts nevertheless.
    """
    return tf.autograph.experimental.do_not_convert(function)


def parallel_calls() -> int | None:
    """For tf.data: as many as it finds worth while; in deterministic mode, where it would refuse them aloud, none."""
    return None if process.is_deterministic() else tf.data.AUTOTUNE


def map_samples(function: Callable[..., tuple[Any, ...]], *batches: Any) -> tuple[Any, ...]:
    """Applies a function of single samples to batches of its arguments."""
    # Measured against nested data sets, which are half as fast on two threads.
    specs = tf.nest.map_structure(lambda batch: tf.TensorSpec(batch.shape[1:], batch.dtype), batches)
    compiled = tf.function(function)
    return tf.map_fn(lambda one: compiled(*one), batches, fn_output_signature=output_spec(compiled, *specs))


def output_spec(function: tf.types.experimental.PolymorphicFunction, *specs: Any) -> Any:
    """The tf.TypeSpec of what a ``tf.function`` returns."""
    outputs = function.get_concrete_function(*specs).structured_outputs
    return tf.nest.map_structure(tf.type_spec_from_value, outputs)


def _require_some(source: Source, excluded: frozenset[int]) -> None:
    if len(excluded) >= source.num_samples:
        raise DataError(f"at least one sample must be good. Received: {source.num_samples} samples, all of them bad")


def _run_ahead(dataset: tf.data.Dataset) -> tf.data.Dataset:
    options = tf.data.Options()
    # In order, so that the n-th batch's error comes with the n-th batch.
    options.deterministic = True
    # The input is sharded by sample number already.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    # Its thread sleeps for up to a minute between two looks, and an iterator that is deleted can wait for it so long
    # (seen with 2.21: 20 s, the main thread in its destructor, all other ranks in a reduction).
    options.autotune.enabled = False
    return dataset.with_options(options).prefetch(2)
