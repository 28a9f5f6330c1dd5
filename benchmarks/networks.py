"""The networks that the benchmarks train, with made-up samples of their shapes."""

import time
from typing import TYPE_CHECKING

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from samples import BATCH_SIZES, TOKENS, VOCABULARY, batch

if TYPE_CHECKING:
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


def lstm() -> keras.Model:
    """A classifier of texts: an embedding of 64, an LSTM of 64, a dense layer."""
    return keras.Sequential(
        [
            layers.Input((TOKENS,), dtype="int32"),
            layers.Embedding(VOCABULARY, 64),
            layers.LSTM(64),
            layers.Dense(10),
        ]
    )


def transformer() -> keras.Model:
    """An embedding of 128, two encoder layers of 4 heads, the mean, a dense layer."""
    tokens = layers.Input((TOKENS,), dtype="int32")
    x = layers.Embedding(VOCABULARY, 128)(tokens)
    for _ in range(2):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 32)(x, x))
        hidden = layers.Dense(256, activation="relu")(x)
        x = layers.LayerNormalization()(x + layers.Dense(128)(hidden))
    return keras.Model(tokens, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


NETWORKS = {make.__name__: (make, BATCH_SIZES[make.__name__]) for make in (cnn, mlp, lstm, transformer)}
"""Name to the network and its batch size per rank."""


def endless_batches(name: str, *, with_factor: bool = True) -> tf.data.Iterator:
    """One made-up batch again and again, with the factor that hvdtrain's input gives it: the input costs nothing."""
    element = (batch(name), np.float32(1)) if with_factor else batch(name)
    return iter(tf.data.Dataset.from_tensors(element).repeat())


def compiled(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> keras.Model:
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=False,
    )
    return model


def step_ms(steps: "CompiledSteps", batches: tf.data.Iterator, num_steps: int) -> float:
    """Makes at least ``num_steps`` steps; the time of one."""
    began_s = time.perf_counter()
    done = 0
    while done < num_steps:
        steps.train(batches, steps.steps_per_call)
        done += steps.steps_per_call
    return 1000 * (time.perf_counter() - began_s) / done
