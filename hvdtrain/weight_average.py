"""The moving average of the weights (EMA) that a Keras optimizer keeps, in place of the weights for a while."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.optimizer import leaves


def keeps_average(optimizer: keras.optimizers.Optimizer) -> bool:
    """True when the optimizer was made with ``use_ema=True``."""
    return any(leaf.use_ema for leaf in leaves(optimizer))


def ramp_up(optimizer: keras.optimizers.Optimizer) -> None:
    """Lets the momentum of the average rise to what it was made with: the smaller of it and ``(1 + n) / (10 + n)``.

    n counts the updates, so that the average of a short run is not that of its first steps. As
    ``tf.train.ExponentialMovingAverage`` with ``num_updates``.

    Args:
        optimizer: distributed, with an average.
    """
    for leaf in leaves(optimizer):
        _ramp_up(leaf, leaf._update_model_variables_moving_average, leaf.ema_momentum)


def _ramp_up(leaf: Any, update: Callable[..., None], highest: float) -> None:
    def ramped(trainable_variables: Sequence[keras.Variable]) -> None:
        updates = tf.cast(leaf._iterations.value // (leaf.gradient_accumulation_steps or 1), tf.float32)
        leaf.ema_momentum = tf.minimum(highest, (1.0 + updates) / (10.0 + updates))
        try:
            update(trainable_variables)
        finally:
            leaf.ema_momentum = highest

    leaf._update_model_variables_moving_average = ramped


@contextmanager
def averaged_weights(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """The model has the averaged weights inside, and its own again after; nothing happens without an average."""
    _swap(optimizer)
    try:
        yield
    finally:
        _swap(optimizer)


def _swap(optimizer: keras.optimizers.Optimizer) -> None:
    for leaf in leaves(optimizer):
        if not leaf.use_ema:
            continue
        for variable, average in zip(leaf._trainable_variables, leaf._model_variables_moving_average, strict=True):
            if average is not None:
                own = tf.identity(variable.value)
                variable.assign(average.value)
                average.assign(own)
