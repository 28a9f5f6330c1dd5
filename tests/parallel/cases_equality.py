"""On all ranks: steps are compared with those of one process, differences are named, and no trace remains."""

import functools
import random

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from models import SHARED_GPUS, relative_difference, values

import hvdtrain
from hvdtrain.distributed import runtime
from hvdtrain.distributed.optimizers import optimizer_variables
from hvdtrain.distributed.replica_consistency import weights_sha256
from hvdtrain.errors import UnequalError, UsageError
from hvdtrain.optim import keras_calls, own_loops
from hvdtrain.training.equality import step_check
from hvdtrain.training.equality.draws import Draws
from hvdtrain.training.equality.step_check import StepCheck

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
    assert finding.largest > 0.4
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


@pytest.mark.parametrize("is_sharded", [True, False])
def test_the_same_batches_are_told_of_also_without_checks(is_sharded, monkeypatch, capfd):
    monkeypatch.setattr(runtime, "on_unequal", lambda: "ignore")
    fit(network(), x=X if is_sharded else FEATURES[: len(X)], y=Y if is_sharded else TARGETS[: len(X)])
    told = "ranks must train on different samples. Received: the same batch on every rank" in capfd.readouterr().err
    assert told == (RANK == 0 and SIZE > 1 and not is_sharded)


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


class Returns(keras.Model):
    def train_step(self, data):
        super().train_step(data)
        return {"largest": ops.max(data[1])}


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


UNEQUAL = {
    "the output of layer 'centred": lambda: fit(network(Centred())),
    "variable 'queue/queue'": lambda: fit(network(Queue())),
    "Received: the loss of which the tape takes the gradient": lambda: fit(network(kind=Vector)),
    "Received: 'median'": lambda: fit(network(), metrics=[Median(name="median")]),
    "Received: a loss of add_loss": lambda: fit(network(Balance())),
    "Divide it by the number of the rank's samples, or pass op='sum' to": lambda: fit(network(), GlobalMean()),
    "Received: loss 'spread": lambda: fit(network(), Spread()),
    "Received: the same batch on every rank": lambda: fit(network(), x=FEATURES, y=TARGETS),
}


@pytest.mark.parametrize("place", UNEQUAL)
def test_where_a_step_is_not_that_of_one_process(place):
    with pytest.raises(UnequalError) as caught:
        UNEQUAL[place]()
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


@pytest.mark.parametrize("verifies", [False, True])
def test_a_loop_of_which_nothing_is_compared_is_reported_once(verifies, monkeypatch, capfd):
    monkeypatch.setattr(own_loops, "_is_known", False)
    model = network()
    model.compile(hvdtrain.DistributedOptimizer(keras.optimizers.SGD()))
    hvdtrain.broadcast(model)

    def step(batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(mean_square(y, model(x)))
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    if verifies:
        hvdtrain.verify(step, (X[:BATCH], Y[:BATCH]), model)
    for _ in range(2):
        step((X[:BATCH], Y[:BATCH]))
    line = "hvdtrain: the steps of this training loop are not compared with those of one process"
    assert capfd.readouterr().err.count(line) == (RANK == 0 and not verifies)


def test_a_model_that_ranks_would_train_alone():
    model = fit(network())
    model.compile("adam", "mse")
    with pytest.raises(UsageError, match=r"its optimizer must be distributed. Received: .* with adam"):
        model.fit(X, Y, verbose=0)


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


def test_ranks_have_gradients_of_the_same_variables():
    model = network()
    first, second = model.layers[1], model.layers[2]
    model.compile(hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    hvdtrain.broadcast(model)
    trained = first if RANK == 0 else second
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(trained.kernel**2)
    gradients = tape.gradient(loss, model.trainable_variables)
    with pytest.raises(UsageError, match=r"has one on rank 0, and none on rank"):
        model.optimizer.apply(gradients, model.trainable_variables)


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


def test_operations_without_names(found):
    fit(network(kind=Gathers))
    assert [(each.unequal, each.unchecked) for each in found] == [(None, None)]


def test_ranks_have_operations_of_the_same_names():
    for _ in range(RANK):
        network()
    with pytest.raises(UsageError, match="Horovod's operations in a step must have the same names on all ranks"):
        fit(network(kind=Gathers))


def test_batches_of_different_sizes_are_weighted_by_their_samples():
    """Rank r has r + 1 times as many samples in each step as rank 0."""
    sizes = [2 * (rank + 1) for rank in range(SIZE)]
    steps = len(FEATURES) // sum(sizes)
    first = sum(sizes[:RANK])
    own = np.concatenate([np.arange(first, first + sizes[RANK]) + step * sum(sizes) for step in range(steps)])
    alone, together = network(), network()
    alone.compile(keras.optimizers.SGD(0.1), mean_square)
    used = steps * sum(sizes)
    alone.fit(FEATURES[:used], TARGETS[:used], batch_size=sum(sizes), shuffle=False, verbose=0)
    together.compile(hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.1)), mean_square)
    hvdtrain.broadcast(together)
    together.fit(FEATURES[own], TARGETS[own], batch_size=sizes[RANK], shuffle=False, verbose=0)
    assert relative_difference(values(together.weights), values(alone.weights)) < 1e-5


def of_different_sizes():
    """Rank r has r + 1 times as many samples in each batch as rank 0; the number of samples in it."""
    own = (RANK + 1) * 2 * SIZE
    return tf.data.Dataset.from_tensor_slices((X[:own], Y[:own])).batch(own).repeat(2), own


def fit_with_different_sizes(model, loss=mean_square, **options) -> keras.Model:
    optimizer = options.pop("optimizer", None) or keras.optimizers.Adam(0.01)
    model.compile(hvdtrain.DistributedOptimizer(optimizer), loss, **options)
    hvdtrain.broadcast(model)
    model.fit(of_different_sizes()[0], verbose=0)
    return model


@pytest.fixture
def found(monkeypatch):
    """What is found, in order."""
    findings = []

    def run(check, batch, run=StepCheck.run):
        findings.append(run(check, batch))
        return findings[-1]

    monkeypatch.setattr(StepCheck, "run", run)
    return findings


class Masked(keras.losses.Loss):
    def call(self, y_true, y_pred):
        values = (y_true - y_pred)[:, 0] ** 2
        values._keras_mask = y_true[:, 0] > 0
        return values


EQUAL_WITH_DIFFERENT_SIZES = {
    "draws": lambda: (network(layers.BatchNormalization(), layers.Dropout(0.5), Noise()), mean_square),
    "masked": lambda: (network(), Masked()),
    "whole batch": lambda: (network(layers.BatchNormalization()), hvdtrain.WholeBatch(Spread())),
    "own step": lambda: (network(layers.BatchNormalization(), kind=MeanStep), None),
}


class MeanStep(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            p = self(x, training=True)
            loss = tf.reduce_mean(mean_square(y, p)) + tf.reduce_mean(hvdtrain.gather(p)) ** 2
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"none": 0.0}


@pytest.mark.parametrize("program", EQUAL_WITH_DIFFERENT_SIZES)
def test_batches_of_different_sizes(program, found):
    model, loss = EQUAL_WITH_DIFFERENT_SIZES[program]()
    fit_with_different_sizes(model, loss, metrics=["mae"] if loss is not None else None)
    assert [(each.unequal, each.unchecked, each.noted) for each in found] == [(None, None, None)]
    assert found[0].compared["gradient"] >= 4


# CI tries two of them.
@pytest.mark.parametrize(
    "place",
    [
        pytest.param(place, marks=[] if "layer" in place or "spread" in place else pytest.mark.long)
        for place in UNEQUAL
        if "the same batch" not in place and "Divide" not in place
    ],
)
def test_where_a_step_is_not_that_of_one_process_with_different_sizes(place, monkeypatch):
    monkeypatch.setattr(f"{__name__}.fit", fit_with_different_sizes)
    with pytest.raises(UnequalError) as caught:
        UNEQUAL[place]()
    assert place in str(caught.value)


def test_ranks_that_are_not_weighted(monkeypatch):
    sizes = " and ".join(str(2 * (rank + 1)) for rank in range(SIZE))
    message = f"batches of different sizes must be weighted by their samples. Received: batches of {sizes} samples"
    accumulating = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    with pytest.raises(UnequalError, match=message):
        fit_with_different_sizes(network(), optimizer=accumulating)
    monkeypatch.setattr(keras_calls, "batch_weight", lambda data, pipelines, **options: None)
    with pytest.raises(UnequalError, match=message):
        fit_with_different_sizes(network())


def test_a_metric_that_counts_batches(capfd):
    class Counts(keras.Model):
        def __init__(self, *arguments, **named):
            super().__init__(*arguments, **named)
            self.error = keras.metrics.Mean(name="error")

        def train_step(self, data):
            super().train_step(data)
            self.error.update_state(tf.reduce_mean(mean_square(data[1], self(data[0]))))
            return self.get_metrics_result()

    fit_with_different_sizes(network(kind=Counts))
    assert capfd.readouterr().err.count("metric 'error' counts batches, not samples") == (RANK == 0)


def test_the_trainer_weighs_an_uneven_step(found, monkeypatch):
    """The only step of an epoch, with one sample more on rank 0 than on the others."""
    of_rank = SIZE * (6 // SIZE)
    samples = SIZE * (of_rank - 1) + 1

    def train(*more):
        model = network(*more)
        model.compile(keras.optimizers.SGD(0.1), mean_square)
        config = hvdtrain.TrainConfig(batch_size=BATCH, steps=1)
        hvdtrain.Trainer(model, (FEATURES[:samples], TARGETS[:samples]), config, reporter=None).fit()

    rows = []
    monkeypatch.setattr(step_check, "Draws", lambda given, seed: rows.append(given) or Draws(given, seed))
    train(layers.Dropout(0.5), layers.BatchNormalization())
    assert (found[-1].unequal, found[-1].unchecked) == (None, None)
    assert len(set(rows[0].sizes)) == 2
    with pytest.raises(UnequalError, match=r"depends on the other samples"):
        train(Centred())
    monkeypatch.setattr(keras_calls, "batch_weight", lambda data, pipelines, **options: None)
    with pytest.raises(UnequalError, match=r"batches of different sizes must be weighted"):
        train()


def test_float8_is_refused_in_one_line():
    model = keras.Sequential([layers.Input((16,)), layers.Dense(16)])
    model.quantize("float8")
    with pytest.raises(UsageError, match="float8 is not supported on several ranks"):
        fit(model, x=np.repeat(X[:, :1], 16, 1), y=np.repeat(Y, 16, 1))
