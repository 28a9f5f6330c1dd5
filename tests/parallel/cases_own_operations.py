"""On all ranks: programs that call Horovod's operations in their steps."""

import horovod.tensorflow as hvd
import keras
import pytest
import tensorflow as tf
from compared_programs import RANK, SIZE, X, Y, fit, mean_square, network
from keras import ops
from noted_findings import noted_findings

import hvdtrain
from hvdtrain.errors import UnequalError, UsageError


def test_one_process_is_alone_in_its_program():
    """A program's own calls of Horovod, in the step of one process."""

    class Gathering(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                everyone = hvd.allgather(self(x, training=True), name="everyone")
                loss = tf.reduce_mean(mean_square(y, self(x, training=True))) + tf.reduce_mean(everyone) ** 2
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    with pytest.raises(UnequalError, match=r"which differs by .* although the loss does not"):
        fit(network(kind=Gathering))


def test_operations_of_a_program_are_computed_in_its_steps_only():
    """Computed while a function is traced, as their values would be for its shapes, they wait for each other."""
    shapes = []

    def step(x):
        for _ in range(2):
            sizes = hvd.allgather(tf.shape(x)[:1])
            shapes.append(tf.zeros(sizes).shape)
        return x

    tf.function(step, autograph=False)(tf.ones([3, 1]))
    assert {shape.rank for shape in shapes} == {None}


class Gathers(keras.Model):
    """Gathers by Horovod's own operations, which name themselves and what is in their gradients."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            parts = [self(x, training=True), self(-x, training=True), y]
            ours, others, targets = (summed_gradient(hvd.allgather(each)) for each in parts)
            loss = ops.mean((ops.matmul(ours, ops.transpose(others)) - targets) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


@tf.custom_gradient
def summed_gradient(x):
    """Horovod's gradient of an allgather averages."""
    return tf.identity(x), lambda upstream: hvd.size() * upstream


def test_operations_without_names(monkeypatch):
    found = noted_findings(monkeypatch)
    fit(network(kind=Gathers))
    assert [(each.unequal, each.unchecked) for each in found] == [(None, None)]


def test_ranks_have_operations_of_the_same_names():
    for _ in range(RANK):
        network()
    with pytest.raises(UsageError, match="Horovod's operations in a step must have the same names on all ranks"):
        fit(network(kind=Gathers))


def reduce_by_optimizer(model, compute, **options):
    @tf.function(**options)
    def step(x, y):
        gradients = compute(x, y)
        model.optimizer.apply(gradients, model.trainable_variables)

    return step


def reduce_by_tape(model, compute, **options):
    @tf.function(**options)
    def step(x, y):
        with hvdtrain.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_mean(mean_square(y, model(x)))
        return tape.gradient(loss, model.trainable_variables)

    return step


def reduce_by_operation(model, compute, **options):
    return tf.function(lambda x, y: hvd.allreduce(tf.reduce_mean(model(x))), **options)


@pytest.mark.parametrize("make_step", [reduce_by_optimizer, reduce_by_tape, reduce_by_operation])
def test_ranks_cannot_communicate_within_what_xla_compiles(make_step):
    model = network()
    model.compile(hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.01)))
    hvdtrain.broadcast(model)

    @tf.function(jit_compile=True)
    def compute(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(mean_square(y, model(x)))
        return tape.gradient(loss, model.trainable_variables)

    if SIZE > 1:
        # The class, too, although AutoGraph raises its errors anew.
        with pytest.raises(UsageError, match=r"outside of functions that XLA compiles\. Received: a reduction"):
            make_step(model, compute, jit_compile=True)(X, Y)
    make_step(model, compute)(X, Y)
