"""Adagrad's update with a sparse gradient, for the rows of the gradient alone; Keras takes roots of the whole state."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.seams import keras_internals


def sparse_update_step(optimizer: keras.optimizers.Optimizer) -> Callable[..., None]:
    """An ``update_step`` of Keras' Adagrad that reads and writes the rows of a sparse gradient only, bit-identically.

    Other optimizers, subclasses of Adagrad, and dense gradients keep Keras' update.
    """
    adagrad: Any = optimizer
    keras_update_step: Callable[..., None] = adagrad.update_step
    if type(optimizer) is not keras.optimizers.Adagrad:
        return keras_update_step

    def update_step(gradient: tf.Tensor | tf.IndexedSlices, variable: tf.Variable, learning_rate: Any) -> None:
        if not isinstance(gradient, tf.IndexedSlices):
            keras_update_step(gradient, variable, learning_rate)
            return
        number = keras_internals.VARIABLE_INDEX.of(adagrad)(variable)
        accumulator: tf.Variable = keras_internals.ACCUMULATORS.of(adagrad)[number].value
        values = tf.cast(gradient.values, variable.dtype)
        accumulator.scatter_add(tf.IndexedSlices(tf.square(values), gradient.indices))
        roots = tf.sqrt(keras.ops.add(accumulator.sparse_read(gradient.indices), adagrad.epsilon))
        # Between the two, because TensorFlow turns a quotient by a root into a product, which rounds otherwise.
        roots = tf.ensure_shape(roots, values.shape)
        change = keras.ops.cast(learning_rate, variable.dtype) * values / roots
        adagrad.assign_sub(variable, tf.IndexedSlices(change, gradient.indices, gradient.dense_shape))

    return update_step
