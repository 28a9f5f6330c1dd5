"""On all ranks: steps are compared with those of one process, differences are named, and no trace remains."""

import functools
import random
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from compared_programs import (
    BATCH,
    COLLECTIVES,
    FEATURES,
    RANK,
    SIZE,
    TARGETS,
    UNEQUAL,
    Centred,
    Noise,
    X,
    Y,
    fit,
    mean_square,
    network,
)
from keras import layers, ops

import hvdtrain
from hvdtrain.distributed import runtime
from hvdtrain.distributed.optimizers import optimizer_variables
from hvdtrain.distributed.replica_consistency import weights_sha256
from hvdtrain.errors import UnequalError
from hvdtrain.optim import keras_calls
from hvdtrain.training.equality import check_memory
from hvdtrain.training.equality.step_check import StepCheck


def test_what_a_step_draws_is_no_difference():
    model = network(layers.BatchNormalization(), layers.Dropout(0.5), Noise(), layers.GaussianNoise(0.1))
    model.compile(hvdtrain.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse", metrics=["mae"])
    hvdtrain.broadcast(model)
    finding = StepCheck(model.train_step, model, COLLECTIVES).run((X[:BATCH], Y[:BATCH]))
    assert (finding.unequal, finding.unchecked) == (None, None)
    assert (finding.compared["gradient"], finding.compared["value"]) == (6, 2)
    assert finding.largest < 1e-5


# With 11, an activation changed its side on a processor with AVX-512; others round otherwise.
@pytest.mark.parametrize("seed", [0, 11])
def test_an_activation_that_rounding_switches_is_no_difference(seed):
    """A ReLU that changes its side changes the gradient by far more than rounding."""
    keras.utils.set_random_seed(seed)
    hidden = inputs = layers.Input((32, 32, 3))
    for width in (16, 32, 64):
        hidden = layers.Conv2D(width, 3, padding="same", strides=1 + (width > 16))(hidden)
        hidden = layers.ReLU()(layers.BatchNormalization()(hidden))
    model = keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(hidden)))
    sparse = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(hvdtrain.DistributedOptimizer(keras.optimizers.Adam()), sparse)
    hvdtrain.broadcast(model)
    generator = np.random.default_rng([seed, RANK])
    images, labels = generator.normal(size=(32, 32, 32, 3)).astype("float32"), generator.integers(0, 10, 32)
    finding = StepCheck(model.train_step, model, COLLECTIVES).run((images, labels))
    assert (finding.unequal, finding.unchecked) == (None, None)


class Cell(layers.SimpleRNNCell):
    """A time step that does what the check must see, or see to."""

    def __init__(self, units, what=None):
        super().__init__(units)
        self.what = what
        self.seeds = keras.random.SeedGenerator(5)
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, name="count")

    def call(self, x, states, training=False):
        if self.what == "draws" and training:
            x *= keras.random.uniform(ops.shape(x), seed=self.seeds)
        elif self.what == "counts" and training:
            self.count.assign_add(1.0)
        elif self.what == "gathers":
            x -= ops.mean(hvdtrain.gather(x), 0)
        elif self.what == "is unequal":
            x -= ops.mean(x, 0)
        return super().call(x, states)


def of_sequences(*recurrent) -> StepCheck:
    keras.utils.set_random_seed(1)
    hidden = inputs = layers.Input((5, 6))
    for layer in recurrent:
        hidden = layer(layers.Masking()(hidden))
    model = keras.Model(inputs, layers.Dense(1)(hidden))
    model.compile(hvdtrain.DistributedOptimizer(keras.optimizers.Adam(0.01)), mean_square)
    hvdtrain.broadcast(model)
    return StepCheck(
        functools.partial(keras_calls.run_weighted_train_step, model, model.train_step), model, COLLECTIVES
    )


SEQUENCES = np.stack([X] * 5, 1)[:BATCH] * np.linspace(-1, 1, 5, dtype="float32")[:, None]


RECURRENT = {
    "dropout": [layers.LSTM(4, dropout=0.5, recurrent_dropout=0.5, return_sequences=True), layers.GRU(4, dropout=0.3)],
    "two directions": [layers.Bidirectional(layers.LSTM(4))],
    **{what: [layers.RNN(Cell(4, what))] for what in ("nothing", "draws", "counts", "gathers")},
}


@pytest.mark.parametrize("is_fault", [False, True])
def test_sums_in_half_precision_are_no_difference(is_fault):
    """Of the gradient of a convolution's bias on CPUs: a sum of ones in bfloat16 ends at 256."""
    keras.utils.set_random_seed(1)
    convolution = layers.Conv2D(8, 3, padding="same", kernel_initializer="zeros", dtype="mixed_bfloat16")
    model = keras.Sequential([layers.Input((16, 16, 1)), convolution])

    def loss(y, p):
        means = ops.mean(ops.cast(p, "float32"), (1, 2, 3))
        return means * ops.cast(ops.shape(p)[0], "float32") if is_fault else means

    model.compile(hvdtrain.DistributedOptimizer(keras.optimizers.SGD()), loss)
    hvdtrain.broadcast(model)
    # Zeros leave only the gradient of the bias.
    x, y = np.full((BATCH, 16, 16, 1), float(is_fault), "float32"), Y[:BATCH, 0]
    finding = StepCheck(model.train_step, model, COLLECTIVES).run((x, y))
    assert (finding.unequal is not None) == is_fault
    # The fault: 0.5 without rounding. Some processors also round the gradient of the kernel.
    assert finding.largest > (0.3 if is_fault else 0.4)
    assert finding.unchecked is None


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in ("dropout", "gathers") else pytest.mark.long) for kind in RECURRENT]
)
def test_recurrent_layers(kind):
    finding = of_sequences(*RECURRENT[kind]).run((SEQUENCES, Y[:BATCH]))
    assert (finding.unequal, finding.unchecked) == (None, None)


def test_a_time_step_that_depends_on_other_samples():
    finding = of_sequences(layers.RNN(Cell(4, "is unequal"), name="unequal")).run((SEQUENCES, Y[:BATCH]))
    assert "the output of layer 'unequal' for a sample depends on the other samples" in finding.unequal


def state_of(model) -> list:
    generator = np.random.get_state()
    variables = [each.numpy() for each in (*model.variables, *optimizer_variables(model))]
    noise = next(layer for layer in model.layers if isinstance(layer, Noise))
    return [*variables, noise.generator.state.numpy(), generator[1], generator[2], random.random(), np.random.uniform()]


def test_a_check_leaves_no_trace():
    model = fit(network(layers.BatchNormalization(), layers.Dropout(0.5), Noise()), metrics=["mae"])
    random.seed(5)
    before = state_of(model)
    random.seed(5)
    np.random.set_state(("MT19937", before[-4], before[-3], 0, 0.0))
    finding = StepCheck(model.train_step, model, COLLECTIVES).run((X[:BATCH], Y[:BATCH]))
    assert finding.unchecked is None
    after = state_of(model)
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize(
    "optimizer", [lambda: keras.optimizers.SGD(0.1, momentum=0.9), lambda: keras.optimizers.Adam()]
)
def test_training_is_the_same_without_checks(optimizer, monkeypatch):
    def train() -> str:
        model = network(layers.BatchNormalization(), layers.Dropout(0.5))
        return weights_sha256(fit(model, optimizer=optimizer(), epochs=2))

    train()  # The first training of a process may round otherwise.
    checked = train()
    monkeypatch.setattr(runtime, "on_unequal", lambda: "ignore")
    assert train() == checked


class Returns(keras.Model):
    def train_step(self, data):
        super().train_step(data)
        return {"largest": ops.max(data[1])}


@pytest.mark.parametrize("place", UNEQUAL)
def test_where_a_step_is_not_that_of_one_process(place):
    with pytest.raises(UnequalError) as caught:
        UNEQUAL[place](fit)
    assert place in str(caught.value)
    assert "hvdtrain.init(on_unequal='warn')" in str(caught.value)


def test_other_values_are_noted(capfd):
    fit(network(kind=Returns))
    text = capfd.readouterr().err
    assert text.count("'largest', which train_step returns, is the mean of the values of all ranks") == (RANK == 0), (
        text
    )


def test_an_unequal_step_may_be_made_nevertheless(monkeypatch, capfd):
    monkeypatch.setattr(runtime, "on_unequal", lambda: "warn")
    fit(network(Centred()))
    text = capfd.readouterr().err
    assert text.count("depends on the other samples of the batch") == (RANK == 0), text


def test_a_step_that_is_no_function_of_its_samples_is_said_once(capfd):
    calls = []

    class Counted(layers.Layer):
        def call(self, x):
            calls.append(1)
            return x * (1.0 + len(calls))

    fit(network(Counted()), epochs=2)
    text = capfd.readouterr().err
    assert text.count("cannot be compared with that of one process") == (RANK == 0), text


def test_trainer():
    model = network(Centred())
    model.compile(keras.optimizers.SGD(0.1), mean_square)
    config = hvdtrain.TrainConfig(batch_size=BATCH, steps=2)
    with pytest.raises(UnequalError, match=r"depends on the other samples.*on_unequal"):
        hvdtrain.Trainer(model, (FEATURES, TARGETS), config, reporter=None).fit()


def loop(change=lambda gradients: gradients):
    model = network()
    optimizer = hvdtrain.DistributedOptimizer(keras.optimizers.Adam(0.01))
    model.compile(optimizer)
    hvdtrain.broadcast(model)

    @tf.function
    def step(data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(mean_square(y, model(x, training=True)))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(change(gradients), model.trainable_variables)
        return {"mean square": loss}

    return hvdtrain.verify(step, (X[:BATCH], Y[:BATCH]), model)


def test_verify():
    finding = loop()
    assert finding.compared == {"gradient": 4, "variable": 14, "value": 1, "returned": 1}
    with pytest.raises(UnequalError, match=r"changed between tape and update"):
        loop(lambda gradients: tf.clip_by_global_norm(gradients, 0.01)[0])


def test_verify_between_two_micro_batches():
    """Ranks hold different gradients then, and rightly so."""
    model = network()
    model.compile(hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)), mean_square)
    hvdtrain.broadcast(model)
    data = (X[:BATCH], Y[:BATCH])
    model.optimizer.build(model.trainable_variables)
    assert hvdtrain.verify(model.train_step, data, model).unchecked is None
    model.train_step(data)
    assert "micro-batches" in hvdtrain.verify(model.train_step, data, model).unchecked
    model.train_step(data)
    assert hvdtrain.verify(model.train_step, data, model).unchecked is None


def test_a_check_that_memory_does_not_suffice_for_is_left_out(monkeypatch):
    """On all ranks, also if it is short on the host of one."""
    model = network(layers.Dense(50, use_bias=False))
    model.compile(hvdtrain.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    hvdtrain.broadcast(model)
    data = (X[:BATCH], Y[:BATCH])
    model.optimizer.build(model.trainable_variables)
    assert StepCheck(model.train_step, model, COLLECTIVES).run(data).unchecked is None
    # Weights and Adam's two slots: what two steps make of them, and gradients.
    needed = COLLECTIVES.local_size * 4 * model.count_params() * (2 * 3 + 5)
    monkeypatch.setattr(check_memory, "available_bytes", lambda: needed if RANK == SIZE - 1 else 10**12)
    weights = weights_sha256(model)
    finding = StepCheck(model.train_step, model, COLLECTIVES).run(data)
    assert finding.unchecked.startswith("a check would take 0.0 GB on a host, of whose memory 0.0 GB")
    assert weights_sha256(model) == weights
    # What needs no memory is still compared.
    same = (FEATURES[:BATCH], TARGETS[:BATCH])
    assert "the same batch on every rank" in StepCheck(model.train_step, model, COLLECTIVES).run(same).unequal


def test_verify_of_a_tape():
    model = network()
    model.compile(keras.optimizers.SGD(0.1))
    hvdtrain.broadcast(model)

    def step(data):
        with hvdtrain.DistributedGradientTape() as tape:
            loss = tf.reduce_mean(mean_square(data[1], model(data[0], training=True)))
        gradients = tf.clip_by_global_norm(tape.gradient(loss, model.trainable_variables), 0.01)[0]
        model.optimizer.apply(gradients, model.trainable_variables)

    assert hvdtrain.verify(step, (X[:BATCH], Y[:BATCH]), model).unequal is None


def test_different_models_are_named_as_a_possible_cause():
    for rate, is_named in ((0.1 * (1 + RANK % 2), True), (0.1, False)):
        model = network(layers.Dropout(rate), layers.Lambda(lambda x: x - ops.mean(x)))
        model.compile(hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
        hvdtrain.broadcast(model)
        finding = StepCheck(model.train_step, model, COLLECTIVES).run((X[:BATCH], Y[:BATCH]))
        assert finding.unequal is not None
        cause = r"may be the cause: rate of layer \d+ \(Dropout\): 0.1 on rank.* 0.*, 0.2 on rank.* 1"
        assert bool(re.search(cause, finding.unequal)) == is_named
        assert ("may be the cause" in finding.unequal) == is_named


@pytest.mark.parametrize("seems_synchronized", [True, False])
def test_layers_that_normalize_over_each_rank_are_named(seems_synchronized):
    model = network(layers.BatchNormalization(synchronized=seems_synchronized, name="alone"))
    model.compile(hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
    hvdtrain.broadcast(model)
    check = StepCheck(model.train_step, model, COLLECTIVES)
    finding = check.run((X[:BATCH], Y[:BATCH]))
    if seems_synchronized:
        assert "layer 'alone', which normalizes over those of each rank" in finding.unequal
    else:
        assert finding.unequal is None
        assert "over each rank's samples in 'alone', where" in finding.noted
    hvdtrain.synchronize_batch_normalization(model)
    finding = check.run((X[:BATCH], Y[:BATCH]))
    assert (finding.unequal, finding.noted) == (None, None)
