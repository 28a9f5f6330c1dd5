"""The values of variables at one moment, without copying them."""

import keras
import numpy as np
import tensorflow as tf


def host_tensor(variable: keras.Variable) -> tf.Tensor:
    """A variable's value in host memory, which it shares on a CPU until the variable is next written."""
    with tf.device("CPU:0"):
        return tf.identity(variable.value)


def host_array(variable: keras.Variable) -> np.ndarray:
    """The same as a read-only array; ``variable.numpy()`` copies."""
    return np.asarray(host_tensor(variable))
