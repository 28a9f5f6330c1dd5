"""One rank's input as a tf.data.Dataset, with helpers for sources that allow random access."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.data.sample_draws import SampleDraws
from hvdtrain.data.sample_plan import SamplePlan, shard_batches
from hvdtrain.data.source import Source
from hvdtrain.distributed.untuned_datasets import without_autotuning
from hvdtrain.errors import DataError, UsageError
from hvdtrain.system import devices

Augment = Callable[[Any, Any, tf.Tensor], tuple[Any, Any]]
"""Maps one sample's x, y and an int32 seed of shape ``[2]`` to the augmented x and y."""

NUMBER, NUMBERS = tf.TensorSpec([], tf.int64), tf.TensorSpec([None], tf.int64)
"""Of values that :func:`asked_when_iterated` asks for."""


def training_dataset(
    source: Source, plan: SamplePlan, *, first_micro_batch: int = 0, excluded: frozenset[int] = frozenset()
) -> tf.data.Dataset:
    """The micro-batches of one rank, for an unlimited number of epochs.

    Elements are ``(data, factor)``: ``data`` is x, ``(x, y)`` or ``(x, y, sample_weight)``, as the source has them;
    ``factor``, a scalar of Keras' ``floatx``, is the weight of this rank's mean loss over the micro-batch (see
    :class:`~hvdtrain.data.sample_plan.Slice`).

    Args:
        first_micro_batch: this rank's micro-batch to start at, counted across epochs.
        excluded: sample numbers to skip. The factor shrinks with the batch; if no sample is left, the
            factor is 0 and the batch contains some other sample.

    Raises:
        UsageError: the plan shuffles a source that has a fixed order.
        DataError: all samples are excluded.
    """
    require_some(source, excluded)
    return dataset_of_draws(source, SampleDraws(plan, first_micro_batch, excluded))


def dataset_of_draws(source: Source, draws: SampleDraws) -> tf.data.Dataset:
    """The same for micro-batches that may change between iterations.

    Raises:
        UsageError: the plan shuffles a source that has a fixed order.
    """
    assert draws.plan.num_samples == source.num_samples
    if source.keeps_order and draws.plan.shuffle:
        raise UsageError("the plan must have shuffle=False: this source has a fixed order. Received: shuffle=True")
    return _run_ahead(source.training_batches(draws))


def evaluation_dataset(
    source: Source,
    batch_size: int,
    rank: int,
    size: int,
    *,
    first_batch: int = 0,
    excluded: frozenset[int] = frozenset(),
) -> tf.data.Dataset:
    """One rank's share of the samples in batches, as the source has them; all shares cover each sample once.

    The batches contain the samples of :func:`~hvdtrain.data.sample_plan.shard_batches`.

    Args:
        first_batch: number of batches to skip at the beginning.
        excluded: sample numbers to skip; batches that become empty are dropped.

    Raises:
        DataError: all samples are excluded.
    """
    require_some(source, excluded)
    return evaluation_of_draws(
        source, lambda: shard_batches(source.num_samples, batch_size, rank, size, excluded)[first_batch:]
    )


def evaluation_of_draws(source: Source, draw: Callable[[], list[np.ndarray]]) -> tf.data.Dataset:
    """The same for batches that may change between iterations.

    Args:
        draw: the sample numbers of each batch of this rank's share, or of its last batches.
    """
    return _run_ahead(source.evaluation_batches(draw))


def random_access_training(
    read: Callable[[tf.Tensor, tf.Tensor], tuple[Any, ...]], draws: SampleDraws
) -> tf.data.Dataset:
    """Training micro-batches, read by a function of sample numbers ``[batch]`` and seeds ``[batch, 2]``."""
    drawn = _computed_micro_batches(draws) if draws.plan.computes_order else _micro_batches_of_epochs(draws)

    @without_autograph
    def micro_batch(seed: tf.Tensor, numbers: tf.Tensor, weight: tf.Tensor) -> tuple[tuple[Any, ...], tf.Tensor]:
        seeds = tf.stack([tf.fill(tf.shape(numbers), seed), tf.cast(numbers, tf.int32)], axis=1)
        return read(numbers, seeds), tf.cast(weight, keras.config.floatx())

    return drawn.map(micro_batch, num_parallel_calls=parallel_calls())


def _micro_batches_of_epochs(draws: SampleDraws) -> tf.data.Dataset:
    """Epoch's seed, sample numbers and weight of each micro-batch; the order of an epoch is held in memory."""

    @without_autograph
    def one_epoch(epoch: tf.Tensor) -> tf.data.Dataset:
        dtypes = [tf.int32, tf.int64, tf.int64, tf.int64, tf.float64]
        seed, order, starts, counts, weights = tf.numpy_function(draws.epoch, [epoch], dtypes)
        for vector in (order, starts, counts, weights):
            vector.set_shape([None])
        seed.set_shape([])
        parts = tf.data.Dataset.from_tensor_slices((starts, counts, weights))
        return parts.map(without_autograph(lambda start, count, weight: (seed, order[start : start + count], weight)))

    def from_first(epoch: tf.Tensor, skipped: tf.Tensor) -> tf.data.Dataset:
        return tf.data.Dataset.range(epoch, np.iinfo(np.int64).max).flat_map(one_epoch).skip(skipped)

    return asked_when_iterated(draws.first_in_epoch, [NUMBER, NUMBER], from_first)


def _computed_micro_batches(draws: SampleDraws) -> tf.data.Dataset:
    """The same for very many samples: each micro-batch is computed from its number when it is read."""

    @without_autograph
    def drawn(micro_batch: tf.Tensor) -> tuple[tf.Tensor, ...]:
        seed, numbers, weight = tf.numpy_function(draws.micro_batch, [micro_batch], [tf.int32, tf.int64, tf.float64])
        seed.set_shape([])
        numbers.set_shape([None])
        weight.set_shape([])
        return seed, numbers, weight

    def from_first(first: tf.Tensor) -> tf.data.Dataset:
        return tf.data.Dataset.range(first, np.iinfo(np.int64).max).map(drawn)

    return asked_when_iterated(draws.first, [NUMBER], from_first)


def asked_when_iterated(
    ask: Callable[[], Any], specs: Sequence[tf.TensorSpec], dataset: Callable[..., tf.data.Dataset]
) -> tf.data.Dataset:
    """A dataset that depends on what a Python function returns each time that it begins to be iterated.

    Args:
        ask: returns NumPy values of these specs.
        dataset: receives them as tensors.
    """

    @without_autograph
    def begin(_: tf.Tensor) -> tf.data.Dataset:
        answers = tf.nest.flatten(tf.numpy_function(ask, [], [spec.dtype for spec in specs]))
        # Copies: TensorFlow's optimizer of datasets crashes if the output of a Python function is what skip() skips.
        values = [tf.identity(each) for each in answers]
        for value, spec in zip(values, specs, strict=True):
            value.set_shape(spec.shape)
        return dataset(*values)

    return tf.data.Dataset.from_tensors(0).flat_map(begin)


def random_access_evaluation(
    read: Callable[[tf.Tensor], tuple[Any, ...]], draw: Callable[[], list[np.ndarray]]
) -> tf.data.Dataset:
    """Evaluation batches, read by a function of sample numbers ``[batch]``."""

    def ask() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        batches = draw()
        counts = np.array([len(batch) for batch in batches], dtype=np.int64)
        ends = np.cumsum(counts)
        return np.concatenate([np.zeros(0, np.int64), *batches]), ends - counts, ends

    def share(numbers: tf.Tensor, starts: tf.Tensor, ends: tf.Tensor) -> tf.data.Dataset:
        parts = tf.data.Dataset.from_tensor_slices((starts, ends))
        return parts.map(without_autograph(lambda start, end: numbers[start:end]))

    drawn = asked_when_iterated(ask, [NUMBERS, NUMBERS, NUMBERS], share)
    return drawn.map(without_autograph(read), num_parallel_calls=parallel_calls())


def without_autograph(function: Callable[..., Any]) -> Callable[..., Any]:
    """Excludes one of our functions from AutoGraph, which takes 0.2 s at start-up and finds nothing to convert.

    A user's function called inside must be a ``tf.function``, which AutoGraph converts regardless.
    """
    return tf.autograph.experimental.do_not_convert(function)


def parallel_calls() -> int | None:
    """tf.data.AUTOTUNE, or None in deterministic mode, where tf.data would reject it with a warning."""
    return None if devices.is_deterministic() else tf.data.AUTOTUNE


def map_samples(function: Callable[..., tuple[Any, ...]], *batches: Any) -> tuple[Any, ...]:
    """Applies a function of single samples to each element of a batch."""
    # Measured alternative: nested datasets, half as fast on two threads.
    specs = tf.nest.map_structure(lambda batch: tf.TensorSpec(batch.shape[1:], batch.dtype), batches)
    compiled = tf.function(function)
    return tf.map_fn(lambda one: compiled(*one), batches, fn_output_signature=output_spec(compiled, *specs))


def output_spec(function: tf.types.experimental.PolymorphicFunction, *specs: Any) -> Any:
    """The tf.TypeSpec of a ``tf.function``'s result."""
    outputs = function.get_concrete_function(*specs).structured_outputs
    return tf.nest.map_structure(tf.type_spec_from_value, outputs)


def require_some(source: Source, excluded: frozenset[int]) -> None:
    """Raises DataError if all samples are excluded."""
    if len(excluded) >= source.num_samples:
        raise DataError(f"at least one sample must be readable. Received: {source.num_samples} samples, all unreadable")


def _run_ahead(dataset: tf.data.Dataset) -> tf.data.Dataset:
    options = tf.data.Options()
    # In order, so that an error in the n-th batch is raised with the n-th batch.
    options.deterministic = True
    # The input is already sharded by sample number.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return without_autotuning(dataset.with_options(options)).prefetch(2)
