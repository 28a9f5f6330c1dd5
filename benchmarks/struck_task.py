"""The task of failures.py: digits, at a pace that a file sets, so that failures find the job training.

``STRUCK_PACE`` names the file. While it exists, a step takes at least the seconds that it holds for each sample; on
rank 1 twice as long if ``STRUCK_UNEVEN`` is set. With ``STRUCK_NAN``, the output of every 100th step is not finite on
one rank, in turn. With ``STRUCK_DOUBLE``, the network is smooth and in double precision, so that runs can be compared
that divide samples differently.
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

NAN_EVERY = 100

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
    """Makes its output not finite on one rank, every 100th step."""

    def build(self, shape: tuple[int, ...]) -> None:
        self.steps = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        if not training or "STRUCK_NAN" not in os.environ:
            return x
        self.steps.assign_add(1)
        turn, rest = self.steps.value // NAN_EVERY, self.steps.value % NAN_EVERY
        is_struck = (rest == 0) & (turn % 2 == environment.launcher().rank)
        return tf.where(is_struck, x * float("nan"), x)


def make_model(data: hvdtrain.data.Data) -> keras.Model:
    if "STRUCK_DOUBLE" in os.environ:
        between = [layers.Dense(32, activation="tanh"), Paced(), layers.Dense(10)]
    else:
        hidden = [layers.Dense(48, activation="relu"), layers.BatchNormalization(momentum=0.9), layers.Dropout(0.2)]
        between = [*hidden, Paced(), SometimesNaN(), layers.Dense(10)]
    return keras.Sequential([layers.Input((8, 8, 1)), layers.Flatten(), *between])


TASK = hvdtrain.Task(
    model=make_model, data=digits.read_data, loss=digits.TASK.loss, metrics=digits.TASK.metrics, optimizer="adam"
)
