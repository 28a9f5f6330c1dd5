"""SGD's update with momentum as one TensorFlow operation; Keras uses seven."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.seams import keras_internals


def fused_update_step(optimizer: keras.optimizers.Optimizer) -> Callable[..., None]:
    """An ``update_step`` of Keras' SGD with momentum that updates a variable in one operation, bit-identically.

    Other optimizers, subclasses of SGD, sparse gradients and half precision keep Keras' update.
    """
    sgd: Any = optimizer
    keras_update_step: Callable[..., None] = sgd.update_step
    if type(optimizer) is not keras.optimizers.SGD or not optimizer.momentum:
        return keras_update_step

    def update_step(gradient: tf.Tensor | tf.IndexedSlices, variable: tf.Variable, learning_rate: Any) -> None:
        if isinstance(gradient, tf.IndexedSlices) or variable.dtype not in (tf.float32, tf.float64):
            keras_update_step(gradient, variable, learning_rate)
            return
        tf.raw_ops.ResourceApplyKerasMomentum(
            var=variable.handle,
            accum=sgd.momentums[keras_internals.VARIABLE_INDEX.of(sgd)(variable)].value.handle,
            lr=keras.ops.cast(learning_rate, variable.dtype),
            grad=tf.cast(gradient, variable.dtype),
            momentum=keras.ops.cast(sgd.momentum, variable.dtype),
            use_nesterov=sgd.nesterov,
        )

    return update_step
