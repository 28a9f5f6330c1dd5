"""The moving average of the weights (EMA) that a Keras optimizer keeps, in place of the weights for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

import keras
import tensorflow as tf

from hvdtrain.optimizer import leaves


def keeps_average(optimizer: keras.optimizers.Optimizer) -> bool:
    """True when the optimizer was made with ``use_ema=True``."""
    return any(leaf.use_ema for leaf in leaves(optimizer))


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
