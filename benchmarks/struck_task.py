"""The task of failures.py: digits, at a pace that a file sets, so that failures find the job training.

``STRUCK_PACE`` names the file. While it exists, a step takes at least the seconds that it holds for each sample; on
rank 1 twice as long if ``STRUCK_UNEVEN`` is set. With ``STRUCK_NAN``, about one in 97 batches of a rank, by its first
sample, makes a gradient that is not finite. With ``STRUCK_DOUBLE``, the network is smooth and in double precision, so
that runs can be compared that divide samples differently.
"""

import os
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import hvdtrain
from hvdtrain.system import environment
from hvdtrain.tasks import digits

NAN_EVERY = 97
BRIGHTEST = 16  # pixels are multiples of a 16th

if "STRUCK_DOUBLE" in os.environ:
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")


def keep_pace(num_samples: np.ndarray) -> np.ndarray:
    try:
        seconds = float(Path(os.environ["STRUCK_PACE"]).read_text())
    except OSError:
        return num_samples
    is_slower = "STRUCK_UNEVEN" in os.environ and environment.launcher().rank == 1
    time.sleep(seconds * int(num_samples) * (2 if is_slower else 1))
    return num_samples


@keras.saving.register_keras_serializable()
class Paced(layers.Layer):
    """Makes steps take as long as they shall."""

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        if not training or "STRUCK_PACE" not in os.environ:
            return x
        with tf.control_dependencies([tf.numpy_function(keep_pace, [tf.shape(x)[0]], tf.int32)]):
            return tf.identity(x)


@keras.saving.register_keras_serializable()
class SometimesNaN(layers.Layer):
    """Makes its output not finite for some batches.

    Not by a counter of its own, which a skipped step would leave unchanged.
    """

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        if not training or "STRUCK_NAN" not in os.environ:
            return x
        brightness = tf.cast(tf.round(tf.reduce_sum(x[:1]) * BRIGHTEST), tf.int32)
        return tf.where(brightness % NAN_EVERY == 0, x * float("nan"), x)


def make_model(data: hvdtrain.data.Data) -> keras.Model:
    if "STRUCK_DOUBLE" in os.environ:
        between = [layers.Dense(32, activation="tanh"), Paced(), layers.Dense(10)]
    else:
        hidden = [layers.Dense(48, activation="relu"), layers.BatchNormalization(momentum=0.9), layers.Dropout(0.2)]
        between = [SometimesNaN(), *hidden, Paced(), layers.Dense(10)]
    return keras.Sequential([layers.Input((8, 8, 1)), layers.Flatten(), *between])


TASK = hvdtrain.Task(
    model=make_model, data=digits.read_data, loss=digits.TASK.loss, metrics=digits.TASK.metrics, optimizer="adam"
)
