"""The values of variables at one moment, without copying them."""

import keras
import numpy as np
import tensorflow as tf


def resource_of(variable: keras.Variable | tf.Variable) -> tf.Variable:
    """TensorFlow's variable: Keras' optimizers also train variables that are not Keras' own."""
    return variable if isinstance(variable, tf.Variable) else variable.value


def path_of(variable: keras.Variable | tf.Variable) -> str:
    """What messages call a variable."""
    return str(variable.name if isinstance(variable, tf.Variable) else variable.path)


def host_tensor(variable: keras.Variable | tf.Variable) -> tf.Tensor:
    """A variable's value in host memory, which it shares on a CPU until the variable is next written."""
    with tf.device("CPU:0"):
        return tf.identity(resource_of(variable))


def host_array(variable: keras.Variable | tf.Variable) -> np.ndarray:
    """The same as a read-only array; ``variable.numpy()`` copies."""
    return np.asarray(host_tensor(variable))


def host_rows(variable: keras.Variable | tf.Variable, place: slice) -> np.ndarray:
    """A copy of consecutive rows of a variable in host memory.

    Of a variable whose rows are updated in place, TensorFlow would copy all to read it as a whole.
    """
    return np.asarray(resource_of(variable).sparse_read(tf.range(place.start, place.stop)))
