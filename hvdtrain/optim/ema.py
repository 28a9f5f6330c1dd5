"""The exponential moving average (EMA) of the weights that a Keras optimizer keeps with ``use_ema=True``."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.config import exclusions
from hvdtrain.distributed.optimizers import leaves_of
from hvdtrain.distributed.shards import Part, part_of
from hvdtrain.optim.pipeline import pipelines_of
from hvdtrain.seams import keras_internals


def keeps_ema(model: keras.Model) -> bool:
    """Whether an optimizer of the model was made with ``use_ema=True``."""
    return any(leaf.use_ema for leaf in leaves_of(model))


def keep_ema_weights(model: keras.Model) -> None:
    """Replaces the model's weights by their EMA, if there is one."""
    for leaf in leaves_of(model):
        leaf.finalize_variable_values(keras_internals.TRAINABLE_VARIABLES.of(leaf))


@contextmanager
def ema_weights(model: keras.Model) -> Iterator[None]:
    """Exchanges the model's weights for their EMA in the block; does nothing without an EMA."""
    _swap(model)
    try:
        yield
    finally:
        _swap(model)


def _swap(model: keras.Model) -> None:
    for leaf in leaves_of(model):
        if not leaf.use_ema:
            continue
        pairs = list(zip(keras_internals.TRAINABLE_VARIABLES.of(leaf), keras_internals.EMA.of(leaf), strict=True))
        own = [None if average is None else tf.identity(_own_value(variable, average)) for variable, average in pairs]
        keras_internals.OVERWRITE.of(leaf)(keras_internals.TRAINABLE_VARIABLES.of(leaf))
        for (_, average), value in zip(pairs, own, strict=True):
            if average is not None:
                average.assign(value)


def require_whole_ema(model: keras.Model, callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Refuses Keras' callback that exchanges weights and EMA if each rank keeps only its part of the EMA.

    Raises:
        UsageError: a sharded model is to be trained with it.
    """
    swaps = any(isinstance(each, keras.callbacks.SwapEMAWeights) for each in callbacks)
    if swaps and any(pipeline.reduce.sharded is not None for _, pipeline in pipelines_of(model)):
        exclusions.require_compatible(exclusions.facts_from(exclusions.SHARDED_OPTIMIZER, exclusions.SWAPPED_EMA))


def with_ramped_momentum(optimizer: Any, average: Callable[..., None]) -> Callable[..., None]:
    """An update of the EMA whose momentum is the smaller of its final value and ``(1 + n) / (10 + n)`` after n updates.

    The EMA of a short run is then not dominated by its first steps. The same as ``tf.train.ExponentialMovingAverage``
    with ``num_updates``.
    """

    def update(*arguments: Any) -> None:
        final = optimizer.ema_momentum
        updates = tf.cast(
            keras_internals.ITERATIONS.of(optimizer).value // (optimizer.gradient_accumulation_steps or 1), tf.float32
        )
        optimizer.ema_momentum = tf.minimum(final, (1.0 + updates) / (10.0 + updates))
        try:
            average(*arguments)
        finally:
            optimizer.ema_momentum = final

    return update


def after_last_micro_batch(optimizer: Any, action: Callable[..., None]) -> Callable[..., None]:
    """Performs an action once per step under gradient accumulation, where Keras performs it at each micro-batch."""

    def run(*arguments: Any) -> None:
        is_last = (
            tf.convert_to_tensor(keras_internals.ITERATIONS.of(optimizer)) + 1
        ) % optimizer.gradient_accumulation_steps == 0
        keras.ops.cond(is_last, lambda: action(*arguments), lambda: None)

    return run


def moving_average_per_update(optimizer: Any) -> Callable[..., None]:
    """An EMA that is updated once per step under gradient accumulation.

    Keras updates it at each micro-batch, even if the weights have not changed: it decays K times too slowly.
    """
    steps = optimizer.gradient_accumulation_steps

    def update(trainable_variables: Sequence[keras.Variable]) -> None:
        if not optimizer.use_ema:
            return
        micro_batches = tf.convert_to_tensor(keras_internals.ITERATIONS.of(optimizer)) + 1
        # The first update starts the average.
        momentum = tf.where(micro_batches > steps, tf.cast(optimizer.ema_momentum, tf.float64), 0.0)

        def average_all() -> None:
            for variable, average in zip(trainable_variables, keras_internals.EMA.of(optimizer), strict=True):
                if average is not None:
                    kept = tf.cast(momentum, average.dtype)
                    average.assign(kept * average + (1 - kept) * _own_value(variable, average))

        keras.ops.cond(micro_batches % steps == 0, average_all, lambda: None)

    return update


def _own_value(variable: keras.Variable, average: keras.Variable) -> tf.Tensor:
    """The value of a variable, or this rank's part of it if the average is of that part."""
    part = part_of(average)
    return part.of(variable.value) if isinstance(part, Part) else variable.value.read_value()
