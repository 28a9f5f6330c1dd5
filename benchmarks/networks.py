"""The networks that the benchmarks train, with made-up samples of their shapes."""

import time

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from hvdtrain.steps import CompiledSteps


def cnn() -> keras.Model:
    """The CIFAR-10 tutorial's convolutional network without its normalisation, 1,068,298 parameters."""
    return keras.Sequential(
        [
            layers.Input((24, 24, 3)),
            layers.Conv2D(64, 5, padding="same", activation="relu"),
            layers.MaxPooling2D(3, 2, padding="same"),
            layers.Conv2D(64, 5, padding="same", activation="relu"),
            layers.MaxPooling2D(3, 2, padding="same"),
            layers.Flatten(),
            layers.Dense(384, activation="relu"),
            layers.Dense(192, activation="relu"),
            layers.Dense(10),
        ]
    )


def mlp() -> keras.Model:
    """64-256-256-10, 85,002 parameters: a step so short that everything around it shows."""
    return keras.Sequential(
        [
            layers.Input((64,)),
            layers.Dense(256, activation="relu"),
            layers.Dense(256, activation="relu"),
            layers.Dense(10),
        ]
    )


NETWORKS = {"cnn": (cnn, 64), "mlp": (mlp, 32)}
"""Name to the network and its batch size per rank."""


def endless_batches(model: keras.Model, batch_size: int, *, with_factor: bool = True) -> tf.data.Iterator:
    """One made-up batch again and again, with the factor that hvdtrain's input gives it: the input costs nothing."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(batch_size, *model.input_shape[1:])).astype(np.float32)
    y = rng.integers(0, 10, batch_size).astype(np.int32)
    element = ((x, y), np.float32(1)) if with_factor else (x, y)
    return iter(tf.data.Dataset.from_tensors(element).repeat())


def compiled(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> keras.Model:
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=False,
    )
    return model


def step_ms(steps: CompiledSteps, batches: tf.data.Iterator, num_steps: int) -> float:
    """Makes at least ``num_steps`` steps; the time of one."""
    began_s = time.perf_counter()
    done = 0
    while done < num_steps:
        steps.train(batches, steps.steps_per_call)
        done += steps.steps_per_call
    return 1000 * (time.perf_counter() - began_s) / done
