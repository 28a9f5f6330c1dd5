"""On 2 ranks: a program that is equal to one process is broken in many ways, one by one; the check finds it."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from models import SHARED_GPUS

import hvdtrain
from hvdtrain.distributed import runtime
from hvdtrain.errors import HvdtrainError

TOPOLOGY = hvdtrain.init(seed=0, gpus=SHARED_GPUS)
RANK, SIZE = TOPOLOGY.rank, TOPOLOGY.size
COLLECTIVES = runtime.current().collectives
BATCH, STEPS = 8, 2
FEATURES = np.random.RandomState(1).normal(size=(STEPS * SIZE * BATCH, 6)).astype("float32")
TARGETS = np.tanh(FEATURES @ np.ones((6, 1), "float32")) + 0.1
# One of 32 is a branch that both the ranks and one process take in the steps that are compared.
MAX_MISSED = 1


class Program:
    """A small regression; each mutation replaces a part."""

    layer = None
    kind = keras.Model
    metrics = ("mae",)
    epochs = 1

    def loss(self, y, p):
        return ops.mean(ops.square(y - p), -1)

    def optimizer(self):
        return keras.optimizers.Adam(0.01)

    def data(self):
        return hvdtrain.shard(FEATURES, TARGETS)

    def run(self):
        keras.utils.set_random_seed(1)
        hidden = inputs = layers.Input((6,))
        hidden = layers.Dense(8, activation="tanh")(hidden)
        hidden = hidden if self.layer is None else self.layer(hidden)
        model = self.kind(inputs, layers.Dense(1)(layers.Dropout(0.2)(hidden)))
        loss = self.loss if isinstance(self.loss, keras.losses.Loss) else lambda y, p: self.loss(y, p)
        model.compile(hvdtrain.DistributedOptimizer(self.optimizer()), loss, metrics=list(self.metrics) or None)
        hvdtrain.broadcast(model)
        model.fit(*self.data(), batch_size=BATCH, epochs=self.epochs, shuffle=False, verbose=0)


def with_loss(function):
    return type(function.__name__, (Program,), {"loss": staticmethod(function)})


# Losses.


def divided_by_the_global_batch(y, p):
    return ops.sum(ops.square(y - p)) / (SIZE * BATCH)


def summed_over_the_batch(y, p):
    return ops.sum(ops.square(y - p), keepdims=True)[:, 0] + ops.zeros_like(p[:, 0])


def centred_predictions(y, p):
    return ops.mean(ops.square(y - p + ops.mean(p)), -1)


def divided_by_positive_targets(y, p):
    known = ops.cast(y > 0, "float32")
    return ops.sum(known * ops.square(y - p)) / ops.sum(known)


def dice(y, p):
    p = ops.sigmoid(p)
    return 1 - 2 * ops.sum(y * p) / (ops.sum(y) + ops.sum(p) + 9)


def contrastive(y, p):
    near = ops.exp(-ops.square(p - ops.transpose(p)))
    return -ops.log(ops.sum(near * ops.exp(-ops.square(y - ops.transpose(y))), 1) / ops.sum(near, 1))


def ranking(y, p):
    return ops.mean(ops.relu(1 - (p - ops.transpose(p)) * ops.sign(y - ops.transpose(y))), 1)


def hardest_sample(y, p):
    return ops.max(ops.square(y - p)) + ops.zeros_like(p[:, 0])


def correlation(y, p):
    a, b = y - ops.mean(y), p - ops.mean(p)
    return -ops.sum(a * b) / (1e-3 + ops.sqrt(ops.sum(a**2) * ops.sum(b**2)))


def tiny_losses_of_pairs(y, p):
    return 1e-6 * ops.mean(ops.square(y - p), -1) * ops.mean(ops.abs(p))


class OwnCall(keras.losses.Loss):
    def __call__(self, y_true, y_pred, sample_weight=None):
        return ops.sum(ops.square(y_true - y_pred)) / (SIZE * BATCH)


class LossClass(Program):
    loss = OwnCall()


# Layers.


def layer(function, name):
    class Mutated(layers.Layer):
        def call(self, x, training=False):
            return function(self, x)

    return type(name, (Program,), {"layer": property(lambda self: Mutated())})


def with_sum(self, x):
    self.add_loss(0.1 * ops.sum(ops.square(x)))
    return x


def with_balance(self, x):
    self.add_loss(ops.sum(ops.square(ops.mean(ops.softmax(x), 0))))
    return x


def deviation(self, x):
    return ops.concatenate([x, ops.zeros_like(x[:, :1]) + ops.mean(ops.std(x, 0))], 1)


class Queue(layers.Layer):
    def build(self, shape):
        self.queue = self.add_weight(shape=(4, shape[-1]), initializer="ones", trainable=False)

    def call(self, x, training=False):
        if training:
            self.queue.assign(ops.concatenate([x, self.queue], 0)[:4])
        return x


class WithQueue(Program):
    layer = property(lambda self: Queue())


class Largest(layers.Layer):
    def build(self, shape):
        self.largest = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.largest.assign(ops.maximum(self.largest, ops.max(ops.abs(x), 0)))
        return x


class WithLargest(Program):
    layer = property(lambda self: Largest())


# Steps.


class OwnStep(keras.Model):
    def loss_of(self, x, y):
        return ops.mean(ops.square(y - self(x, training=True)))

    def change(self, gradients, loss):
        return gradients

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(x, y)
        gradients = self.change(tape.gradient(loss, self.trainable_variables), loss)
        self.optimizer.apply(gradients, self.trainable_variables)
        return self.values(x, y, loss)

    def values(self, x, y, loss):
        return {"loss": tf.reduce_mean(loss)}


def step(name, **methods):
    return type(name, (Program,), {"kind": type(name, (OwnStep,), methods), "metrics": ()})


def scaled_by_the_rank(self, gradients, loss):
    return [each * (1.0 + runtime.current().topology.rank) for each in gradients]


def skipped_at_a_small_loss(self, gradients, loss):
    return [each * tf.cast(loss > tf.stop_gradient(loss) * 0 + 0.3, each.dtype) for each in gradients]


def scaled_by_the_loss(self, gradients, loss):
    return [each / loss for each in gradients]


def rate_from_the_loss(self, gradients, loss):
    self.optimizer.learning_rate = 0.01 * tf.minimum(loss, 1.0)
    return gradients


def vector_of_losses(self, x, y):
    return ops.mean(ops.square(y - self(x, training=True)), -1)


def square_of_the_mean(self, x, y):
    return ops.square(ops.mean(ops.square(y - self(x, training=True))))


def gathered_by_horovod(self, x, y):
    import horovod.tensorflow as hvd

    everyone = hvd.allgather(self(x, training=True), name="mutated")
    return ops.mean(ops.square(hvd.allgather(y, name="mutated_targets") - everyone))


class UnreducedStep(keras.Model):
    """Applies the gradients of this rank, by which no tape knows that it differentiates."""

    def train_step(self, data):
        x, y = data
        weights = [tf.identity(each.value) for each in self.trainable_variables]
        with tf.GradientTape() as tape:
            tape.watch(weights)
            bias = weights[-1]
            loss = ops.mean(ops.square(y - self(x, training=True) - bias + tf.stop_gradient(bias)))
        self.optimizer.apply([tape.gradient(loss, bias)], [self.trainable_variables[-1]])
        self.trainable_variables[0].assign_sub(0.1 * ops.mean(x) * tf.ones_like(weights[0]))
        return {"loss": loss}


class Unreduced(Program):
    kind = UnreducedStep
    metrics = ()


# Optimizers.


class ScalesByRank(keras.optimizers.SGD):
    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient * (1.0 + runtime.current().topology.rank), variable, learning_rate)


class OptimizerOfARank(Program):
    def optimizer(self):
        return ScalesByRank(0.1)


# Metrics.


class Maximum(keras.metrics.Metric):
    def __init__(self, name="maximum"):
        super().__init__(name=name)
        self.value = self.add_weight(name="value", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(ops.maximum(self.value, ops.max(y_true)))

    def result(self):
        return self.value


class FromOne(keras.metrics.Metric):
    def __init__(self, name="from_one"):
        super().__init__(name=name)
        self.total = self.add_weight(name="total", initializer="ones")

    def reset_state(self):
        self.total.assign(1.0)

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(ops.sum(y_true))

    def result(self):
        return self.total


def median(y, p):
    return ops.median(ops.abs(y - p))


def metric(name, make):
    return type(name, (Program,), {"metrics": property(lambda self: [make()])})


# Data.


class SameSamples(Program):
    def data(self):
        return FEATURES, TARGETS


class OtherOrder(Program):
    def data(self):
        order = np.random.RandomState(RANK).permutation(len(FEATURES))
        return hvdtrain.shard(FEATURES[order], TARGETS[order])


MUTATIONS = [
    *map(with_loss, (divided_by_the_global_batch, summed_over_the_batch, centred_predictions)),
    *map(with_loss, (divided_by_positive_targets, dice, contrastive, ranking, hardest_sample, correlation)),
    *map(with_loss, (tiny_losses_of_pairs,)),
    LossClass,
    *(layer(function, function.__name__) for function in (with_sum, with_balance, deviation)),
    layer(lambda self, x: x - ops.mean(ops.relu(x), 0), "centred"),
    layer(lambda self, x: x / (1 + ops.max(ops.abs(x))), "scaled_by_the_largest"),
    WithQueue,
    WithLargest,
    step("scaled_by_the_rank", change=scaled_by_the_rank),
    step("skipped_at_a_small_loss", change=skipped_at_a_small_loss),
    step("scaled_by_the_loss", change=scaled_by_the_loss),
    step("rate_from_the_loss", change=rate_from_the_loss),
    step("vector_of_losses", loss_of=vector_of_losses),
    step("square_of_the_mean", loss_of=square_of_the_mean),
    step("gathered_by_horovod", loss_of=gathered_by_horovod),
    Unreduced,
    OptimizerOfARank,
    metric("median", lambda: median),
    metric("maximum", Maximum),
    metric("from_one", FromOne),
    SameSamples,
    OtherOrder,
]


def outcome(mutation) -> str:
    try:
        mutation().run()
    except HvdtrainError as error:
        return str(error)
    return ""


def test_the_program_itself_is_equal():
    assert outcome(Program) == ""


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_mutations_are_found(capsys):
    found = {mutation.__name__: outcome(mutation) for mutation in MUTATIONS}
    assert len(found) == len(MUTATIONS) >= 30
    with capsys.disabled():
        for name, text in found.items():
            print(f"{name:32} {text or 'NOT FOUND'}", flush=True)
    assert sum(not text for text in found.values()) <= MAX_MISSED
