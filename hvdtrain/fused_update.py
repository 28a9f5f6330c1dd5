"""SGD's update with momentum as one operation of TensorFlow, where Keras makes seven."""

from typing import Any

import keras
import tensorflow as tf


def fuse_update(optimizer: keras.optimizers.Optimizer) -> None:
    """Has a Keras SGD with momentum update each variable at once, with the same result to the bit.

    Other optimizers, subclasses of SGD, sparse gradients and half precision keep Keras' update.
    """
    if type(optimizer) is not keras.optimizers.SGD or not optimizer.momentum:
        return
    sgd: Any = optimizer
    update_by_keras = sgd.update_step

    def update_step(gradient: tf.Tensor | tf.IndexedSlices, variable: tf.Variable, learning_rate: Any) -> None:
        if isinstance(gradient, tf.IndexedSlices) or variable.dtype not in (tf.float32, tf.float64):
            update_by_keras(gradient, variable, learning_rate)
            return
        tf.raw_ops.ResourceApplyKerasMomentum(
            var=variable.handle,
            accum=sgd.momentums[sgd._get_variable_index(variable)].value.handle,
            lr=keras.ops.cast(learning_rate, variable.dtype),
            grad=tf.cast(gradient, variable.dtype),
            momentum=keras.ops.cast(sgd.momentum, variable.dtype),
            use_nesterov=sgd.nesterov,
        )

    sgd.update_step = update_step
