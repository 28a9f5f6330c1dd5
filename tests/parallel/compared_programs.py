"""Small programs whose steps are those of one process, and some whose steps are not: they name where."""

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from models import SHARED_GPUS

import hvdtrain
from hvdtrain.distributed import runtime

TOPOLOGY = hvdtrain.init(seed=0, gpus=SHARED_GPUS)
RANK, SIZE = TOPOLOGY.rank, TOPOLOGY.size
COLLECTIVES = runtime.current().collectives
BATCH = 8
FEATURES = np.random.RandomState(1).normal(size=(4 * SIZE * BATCH, 6)).astype("float32")
TARGETS = FEATURES @ np.ones((6, 1), "float32") + FEATURES[:, :1] ** 2
X, Y = FEATURES[RANK::SIZE], TARGETS[RANK::SIZE]


def mean_square(y, p):
    return ops.mean((y - p) ** 2, -1)


def network(*more, kind=keras.Model) -> keras.Model:
    keras.utils.set_random_seed(1)
    hidden = inputs = layers.Input((6,))
    for layer in (layers.Dense(8, activation="tanh"), *more, layers.Dense(1)):
        hidden = layer(hidden)
    return kind(inputs, hidden)


def fit(model, loss=mean_square, optimizer=None, *, x=X, y=Y, epochs=1, **options) -> keras.Model:
    optimizer = optimizer or keras.optimizers.Adam(0.01)
    model.compile(hvdtrain.DistributedOptimizer(optimizer), loss, **options)
    hvdtrain.broadcast(model)
    model.fit(x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0)
    return model


class Noise(layers.Layer):
    """Draws in every way that programs do."""

    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(3)
        self.generator = tf.random.Generator.from_seed(4)

    def call(self, x, training=False):
        if not training:
            return x
        rows = ops.shape(x)[0]
        x += 0.1 * keras.random.normal(ops.shape(x), seed=self.seeds)
        x += 0.1 * tf.random.uniform(tf.shape(x)) + 0.1 * tf.random.normal([rows, 1])
        x += 0.1 * self.generator.normal(tf.shape(x))
        # Two samples that are mixed belong to one rank.
        x += 0.1 * keras.random.shuffle(x, seed=self.seeds) + 0.1 * tf.random.shuffle(x)
        return x * tf.cast(tf.random.categorical(tf.zeros([rows, 4]), 1), x.dtype)


class Centred(layers.Layer):
    def call(self, x):
        return x - ops.mean(ops.maximum(x, 0.0), 0)


class Queue(layers.Layer):
    def build(self, shape):
        self.queue = self.add_weight(shape=(4, shape[-1]), initializer="ones", trainable=False, name="queue")

    def call(self, x, training=False):
        if training:
            self.queue.assign(ops.concatenate([x, self.queue], 0)[:4])
        return x


class Vector(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = mean_square(y, self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": tf.reduce_mean(loss)}


class Median(keras.metrics.Mean):
    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(ops.median(ops.abs(y_true - y_pred)))


class Spread(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return mean_square(y_true, y_pred - ops.mean(ops.tanh(y_pred)))


class Balance(layers.Layer):
    def call(self, x):
        self.add_loss(ops.sum(ops.mean(x, 0) ** 2))
        return x


class GlobalMean(keras.losses.Loss):
    def __call__(self, y_true, y_pred, sample_weight=None):
        return ops.sum(mean_square(y_true, y_pred)) / (SIZE * BATCH)


# Each takes what trains it.
UNEQUAL: dict[str, Callable[[Callable[..., keras.Model]], keras.Model]] = {
    "the output of layer 'centred": lambda fit: fit(network(Centred())),
    "variable 'queue/queue'": lambda fit: fit(network(Queue())),
    "Received: the loss of which the tape takes the gradient": lambda fit: fit(network(kind=Vector)),
    "Received: 'median'": lambda fit: fit(network(), metrics=[Median(name="median")]),
    "Received: a loss of add_loss": lambda fit: fit(network(Balance())),
    "Divide it by the number of the rank's samples, or pass op='sum' to": lambda fit: fit(network(), GlobalMean()),
    "Received: loss 'spread": lambda fit: fit(network(), Spread()),
    "Received: the same batch on every rank": lambda fit: fit(network(), x=FEATURES, y=TARGETS),
}
