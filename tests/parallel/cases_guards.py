"""On all ranks: what is noticed of any program, without making its step by one process."""

import atexit
import gc
from contextlib import nullcontext

import keras
import numpy as np
import pytest
import tensorflow as tf
from compared_programs import BATCH, COLLECTIVES, FEATURES, RANK, SIZE, TARGETS, X, Y, fit, mean_square, network
from keras import layers

import hvdtrain
from hvdtrain.callbacks import MetricAverageCallback, distributed
from hvdtrain.data import Stream, sharded_order
from hvdtrain.distributed import program_operations, runtime
from hvdtrain.errors import DisagreementError, DivergenceError, UnequalError, UsageError
from hvdtrain.optim import made_steps, own_loops, values_of_parts
from hvdtrain.training.equality import scheduled_check
from hvdtrain.training.equality.compared_data import compare_data
from hvdtrain.training.equality.step_check import Finding


@pytest.mark.parametrize("is_sharded", [True, False])
def test_the_same_batches_are_told_of_also_without_checks(is_sharded, monkeypatch, capfd):
    monkeypatch.setattr(runtime, "on_unequal", lambda: "ignore")
    fit(network(), x=X if is_sharded else FEATURES[: len(X)], y=Y if is_sharded else TARGETS[: len(X)])
    told = "ranks must train on different samples. Received: the same batch on every rank" in capfd.readouterr().err
    assert told == (RANK == 0 and SIZE > 1 and not is_sharded)


DIVIDED = {
    "parts": (lambda random: random(0).permutation(len(FEATURES))[RANK::SIZE], None),
    "parts of other orders": (
        lambda random: random(RANK).permutation(len(FEATURES))[RANK::SIZE],
        "hvdtrain: the ranks' parts of the data overlap: several ranks train on ",
    ),
    "nothing": (
        lambda random: random(RANK).permutation(len(FEATURES)),
        f"hvdtrain: every rank trains on all of the {len(FEATURES)} samples, and not on a part of them. {SIZE} ranks ",
    ),
}


@pytest.mark.parametrize("on_unequal", ["stop", "ignore"])
@pytest.mark.parametrize("kind", DIVIDED)
def test_samples_that_are_not_divided_are_told_of_once(kind, on_unequal, monkeypatch, capfd):
    monkeypatch.setattr(runtime, "on_unequal", lambda: on_unequal)
    choose, expected = DIVIDED[kind]
    chosen = choose(np.random.default_rng)
    fit(network(), x=FEATURES[chosen], y=TARGETS[chosen], epochs=40)
    lines = capfd.readouterr().err.splitlines()
    told = [line for line in lines if "of the data overlap" in line or "all of the" in line]
    assert len(told) == (RANK == 0 and expected is not None)
    assert all(line.startswith(expected) for line in told)


@pytest.mark.parametrize("on_unequal", ["stop", "ignore"])
def test_batches_of_ranks_have_the_same_structure(on_unequal, monkeypatch):
    monkeypatch.setattr(runtime, "on_unequal", lambda: on_unequal)
    found = r"tensors of the same dimensions. Received: 2, 2 on rank 0, 2, 1 on rank 1"
    with pytest.raises(DisagreementError, match=found):
        fit(network(), y=Y[:, 0] if RANK % 2 else Y)


class ShuffledBatches(keras.utils.PyDataset):
    """Batches in an order of its own, that of the data at first, and a new one after each epoch."""

    def __init__(self, random: np.random.Generator):
        super().__init__()
        self.random = random
        self.order = np.arange(len(FEATURES))

    def __len__(self):
        return len(FEATURES) // BATCH

    def __getitem__(self, index):
        chosen = self.order[index * BATCH : (index + 1) * BATCH]
        # Augmentation may be different each time.
        return FEATURES[chosen] + np.random.default_rng().normal(size=(BATCH, 1)), TARGETS[chosen]

    def on_epoch_end(self):
        self.random.shuffle(self.order)


def tensors(random: np.random.Generator) -> tf.data.Dataset:
    order = random.permutation(len(FEATURES))
    return tf.data.Dataset.from_tensor_slices((FEATURES[order], TARGETS[order]))


SHARDED = {
    "arrays": lambda random: tensors(random).batch(len(FEATURES)).get_single_element(),
    "batches of a PyDataset": lambda random: hvdtrain.shard(ShuffledBatches(random)),
    "a data set of arrays": lambda random: hvdtrain.shard(tensors(random)).batch(BATCH),
    "a shard of one's own": lambda random: tensors(random).shard(SIZE, RANK).batch(BATCH),
    "a shard of one's own, shuffled": lambda random: (
        tensors(np.random.default_rng(0)).shuffle(99, seed=int(random.integers(99))).shard(SIZE, RANK).batch(BATCH)
    ),
}


@pytest.mark.parametrize("is_same", [True, False])
@pytest.mark.parametrize("kind", SHARDED)
def test_data_that_ranks_have_in_different_orders(kind, is_same):
    data = SHARDED[kind](np.random.default_rng(7 if is_same else RANK))
    data = {"x": data} if kind != "arrays" else dict(zip("xy", hvdtrain.shard(*data), strict=True))
    model = network()
    model.compile(hvdtrain.DistributedOptimizer(keras.optimizers.Adam(0.01)), mean_square)
    hvdtrain.broadcast(model)
    refused = pytest.raises(UnequalError, match=r"in the same order on all ranks .* Received: different orders")
    with nullcontext() if is_same else refused:
        model.fit(**data, epochs=2, verbose=0)
    with nullcontext() if is_same else refused:
        hvdtrain.verify(lambda batch: model.train_step(batch), (X[:BATCH], Y[:BATCH]), model)


@pytest.mark.parametrize(
    "shard", [hvdtrain.shard, lambda dataset: dataset.shard(SIZE, RANK)], ids=["shard", "one's own"]
)
@pytest.mark.parametrize("is_same", [True, False])
def test_generators_that_yield_in_different_orders_are_told_of_once(is_same, shard, monkeypatch, capfd):
    monkeypatch.setattr(scheduled_check, "_MAX_SHARE_OF_TIME", 1e9)  # The check is repeated after 16 steps.
    random = np.random.default_rng(7 if is_same else RANK)

    def samples():
        for each in random.permutation(len(FEATURES)):
            yield FEATURES[each], TARGETS[each]

    signature = tuple(tf.TensorSpec(each.shape[1:], each.dtype) for each in (FEATURES, TARGETS))
    data = shard(tf.data.Dataset.from_generator(samples, output_signature=signature))
    fit(network(), x=data.batch(BATCH, drop_remainder=True), y=None, epochs=20)
    told = capfd.readouterr().err.count(
        "hvdtrain: a generator yields other elements on other ranks, before hvdtrain.shard"
    )
    assert told == (RANK == 0 and not is_same)


OF_PARTS = {
    "arrays": lambda: hvdtrain.shard(*hvdtrain.shard(FEATURES, TARGETS)),
    "data sets": lambda: hvdtrain.shard(hvdtrain.shard(tf.data.Dataset.range(99)).batch(2)),
    "a shard of one's own, first": lambda: hvdtrain.shard(tf.data.Dataset.range(99).shard(SIZE, RANK).map(tf.identity)),
    "a shard of one's own, later": lambda: hvdtrain.shard(tf.data.Dataset.range(99)).shard(SIZE, RANK),
    "shards of one's own": lambda: tf.data.Dataset.range(99).shard(SIZE, RANK).batch(2).shard(SIZE, RANK),
    "a PyDataset": lambda: hvdtrain.shard(hvdtrain.shard(ShuffledBatches(np.random.default_rng(0)))),
}


@pytest.mark.parametrize("kind", OF_PARTS)
def test_parts_are_not_sharded_again(kind):
    with pytest.raises(UsageError, match=r"data must be sharded once\. Received: this rank's part"):
        OF_PARTS[kind]()


def test_the_same_data_is_sharded_several_times():
    numbers = tf.data.Dataset.range(99)
    for shard in (hvdtrain.shard, lambda whole: whole.shard(SIZE, RANK)):
        assert len(shard(numbers)) == len(shard(numbers))
    numbers.shard(SIZE, RANK).shard(SIZE + 1, 0)  # one of several folds


@pytest.mark.parametrize(
    "shard", [hvdtrain.shard, lambda dataset: dataset.shard(SIZE, RANK), Stream], ids=["shard", "one's own", "Stream"]
)
def test_elements_in_the_order_in_which_they_are_ready(shard):
    options = tf.data.Options()
    options.deterministic = False
    numbers = tf.data.Dataset.range(24)
    kept = shard(numbers.map(tf.identity, num_parallel_calls=4).with_options(options))
    if isinstance(kept, tf.data.Dataset):
        assert kept.batch(2).with_options(options).options().deterministic
    with pytest.raises(UsageError, match=r"in the same order on all ranks .* deterministic=False"):
        shard(numbers.map(tf.identity, num_parallel_calls=4, deterministic=False).take(20))


WORDS = np.array([f"w{number % 5}" for number in range(SIZE * 8)])


def adapted(layer, data):
    layer.adapt(data)
    return layer


PREPARING = {
    "vocabulary": lambda part: layers.StringLookup(vocabulary=sorted(set(WORDS[part]))),
    "StringLookup": lambda part: adapted(layers.StringLookup(), WORDS[part]),
    "IntegerLookup": lambda part: adapted(layers.IntegerLookup(), np.arange(SIZE * 8)[part] % 5),
    "TextVectorization": lambda part: adapted(layers.TextVectorization(), WORDS[part]),
    "Normalization": lambda part: adapted(layers.Normalization(axis=None), np.arange(SIZE * 8.0)[part]),
    "Discretization": lambda part: adapted(layers.Discretization(num_bins=3), np.arange(SIZE * 8.0)[part]),
}


@pytest.mark.parametrize("is_same", [True, False])
@pytest.mark.parametrize("kind", PREPARING)
def test_layers_that_prepare_samples_differently(kind, is_same):
    layer = PREPARING[kind](slice(None) if is_same else slice(RANK * 4, RANK * 4 + 4))
    finding = compare_data(COLLECTIVES)
    assert (finding == Finding({})) == is_same
    if not is_same:
        assert f"adapted to the same data on all ranks. Received: different states of {layer.name!r}" in finding.unequal


def test_layers_are_compared_again_when_they_have_changed():
    layer = layers.StringLookup(vocabulary=["a", "b"])
    assert compare_data(COLLECTIVES) == Finding({})
    layer.set_vocabulary([f"a{RANK}", "b"])
    with pytest.raises(UnequalError, match=r"Received: different states of 'string_lookup.*', so that ranks prepare"):
        fit(network())
    del layer
    gc.collect()
    assert compare_data(COLLECTIVES) == Finding({})


def test_a_shard_of_ones_own_that_is_shuffled_without_a_seed():
    tf.random.set_seed(None)
    tf.data.Dataset.range(99).shuffle(99).shard(SIZE, RANK)
    assert sharded_order.differ(COLLECTIVES.allgather(sharded_order.noted()))


def test_the_order_of_a_data_set_is_noted_once():
    hvdtrain.shard(tensors(np.random.default_rng(0)))
    assert len(sharded_order.noted()) == 1


@pytest.mark.parametrize(
    ("callbacks", "is_told"), [(list, True), (distributed, False), (lambda: [MetricAverageCallback()], False)]
)
def test_values_of_each_ranks_samples_in_fit_are_announced_once(callbacks, is_told, monkeypatch, capfd):
    monkeypatch.setattr(values_of_parts, "_told", set())
    model = network()
    model.compile(hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.01)), mean_square)
    hvdtrain.broadcast(model)
    for _ in range(2):
        model.fit(X, Y, verbose=0, callbacks=callbacks())
    told = capfd.readouterr().err.count("losses and metrics of model.fit are those of each rank's samples.")
    assert told == (RANK == 0 and is_told)


EVALUATED = {
    "its part": lambda: dict(zip("xy", hvdtrain.shard(FEATURES, TARGETS), strict=True)),
    "its part of a data set": lambda: {"x": hvdtrain.shard(tensors(np.random.default_rng(0))).batch(BATCH)},
    "its part, over all ranks": lambda: {**EVALUATED["its part"](), "callbacks": distributed()},
    "all samples": lambda: {"x": FEATURES, "y": TARGETS},
}


@pytest.mark.parametrize("kind", EVALUATED)
def test_values_of_each_ranks_samples_in_evaluate_are_announced_once(kind, monkeypatch, capfd):
    monkeypatch.setattr(values_of_parts, "_told", set())
    model = network()
    model.compile(hvdtrain.DistributedOptimizer(keras.optimizers.SGD()), mean_square)
    hvdtrain.broadcast(model)
    for _ in range(2):
        model.evaluate(**EVALUATED[kind](), verbose=0)
    told = capfd.readouterr().err.count("model.evaluate received each rank's part of the data, and returns its values.")
    assert told == (RANK == 0 and kind in ("its part", "its part of a data set"))


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


def averaged_by_a_tape(tape: tf.GradientTape, loss, weights) -> list[tf.Tensor]:
    return hvdtrain.DistributedGradientTape(tape).gradient(loss, weights)


AVERAGING = {
    "nothing": lambda tape, loss, weights: tape.gradient(loss, weights),
    "hvdtrain.average": lambda tape, loss, weights: hvdtrain.average(tape.gradient(loss, weights)),
    "a tape": averaged_by_a_tape,
}


@pytest.mark.parametrize("compiles", [True, False])
@pytest.mark.parametrize("averaged_by", AVERAGING)
def test_a_loop_in_which_ranks_train_alone_is_reported_once(averaged_by, compiles, monkeypatch, capfd):
    monkeypatch.setattr(own_loops, "_is_lone_loop_known", False)
    monkeypatch.setattr(program_operations, "_has_reduced", False)
    model, optimizer = network(), keras.optimizers.SGD()
    hvdtrain.broadcast(model)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(mean_square(y, model(x)))
        weights = model.trainable_variables
        optimizer.apply(AVERAGING[averaged_by](tape, loss, weights), weights)

    step = tf.function(step) if compiles else step
    for _ in range(2):
        step(X[:BATCH], Y[:BATCH])
    told = capfd.readouterr().err.count("hvdtrain: each rank trains alone in this loop")
    assert told == (RANK == 0 and averaged_by == "nothing")


@pytest.mark.parametrize("differentiates_by", ["weights", "samples"])
@pytest.mark.parametrize("averaged_by", AVERAGING)
def test_a_loop_without_an_optimizer_in_which_ranks_train_alone_is_reported_at_its_end(
    averaged_by, differentiates_by, monkeypatch, capfd
):
    monkeypatch.setattr(own_loops, "_is_lone_loop_known", False)
    monkeypatch.setattr(own_loops, "_watches_gradients", False)
    monkeypatch.setattr(program_operations, "_has_reduced", False)
    monkeypatch.setattr(made_steps, "_optimizers", [])
    monkeypatch.setattr(made_steps, "_steps_of_tapes", None)
    at_exit = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    weights, samples = tf.Variable(tf.ones((FEATURES.shape[1], 1))), tf.constant(X[:BATCH])
    sources = [weights if differentiates_by == "weights" else samples]

    @tf.function
    def step(y):
        with tf.GradientTape() as tape:
            tape.watch(sources)
            loss = tf.reduce_mean((tf.matmul(samples, weights) - y) ** 2)
        (gradient,) = AVERAGING[averaged_by](tape, loss, sources)
        if differentiates_by == "weights":
            weights.assign_sub(0.1 * gradient)

    if averaged_by == "a tape" and differentiates_by == "samples":
        with pytest.raises(UsageError, match=r"must be by variables, .* Received: a tensor\."):
            step.python_function(Y[:BATCH])
        return
    for _ in range(2):
        step(Y[:BATCH])
    for end in at_exit:
        end()
    told = capfd.readouterr().err.count("hvdtrain: each rank has trained alone")
    assert told == (RANK == 0 and averaged_by == "nothing" and differentiates_by == "weights")


@pytest.mark.parametrize("compiles", [True, False])
@pytest.mark.parametrize(
    ("has_tape", "accumulates", "found"),
    [(False, None, "sgd/learning_rate"), (False, 3, "sgd/learning_rate"), (True, None, ".*/kernel")],
)
def test_replicas_that_differ_in_a_loop_are_found(has_tape, accumulates, found, compiles, monkeypatch):
    monkeypatch.setattr(made_steps, "_steps_of_tapes", None)
    model = network()
    if RANK == 0:  # An optimizer that is not used does not matter.
        hvdtrain.DistributedOptimizer(keras.optimizers.SGD())
    optimizer = keras.optimizers.SGD(0.01, gradient_accumulation_steps=accumulates, name="sgd")
    optimizer = optimizer if has_tape else hvdtrain.DistributedOptimizer(optimizer)
    optimizer.build(model.trainable_variables)
    hvdtrain.broadcast(model)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(mean_square(y, model(x)))
        weights = model.trainable_variables
        gradients = averaged_by_a_tape(tape, loss, weights) if has_tape else tape.gradient(loss, weights)
        optimizer.apply(gradients, weights)

    step = tf.function(step) if compiles else step

    def update():
        for _ in range(accumulates or 1):
            step(X[:BATCH], Y[:BATCH])

    for _ in range(10):
        update()
    optimizer.learning_rate = 0.01 + 0.01 * RANK
    text = rf"replicas must be equal. After step 16, variable '{found}' of rank"
    with pytest.raises(tf.errors.UnknownError if compiles else DivergenceError, match=text):  # noqa: PT012
        for _ in range(10):
            update()


def test_a_model_that_ranks_would_train_alone():
    model = fit(network())
    model.compile("adam", "mse")
    with pytest.raises(UsageError, match=r"its optimizer must be distributed. Received: .* with adam"):
        model.fit(X, Y, verbose=0)


@pytest.mark.parametrize(
    ("arguments", "options", "found"),
    [
        ({"momentum": 0.5 + 0.25 * (RANK % 2)}, {}, r"momentum: 0\.5 on rank.* 0.*, 0\.75 on rank.* 1"),
        ({}, {"groups": 1 + RANK % 2}, r"groups: 1 on rank.* 0.*, 2 on rank.* 1"),
    ],
)
def test_optimizers_have_the_same_arguments_in_a_loop_too(arguments, options, found):
    model = network()
    optimizer = hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.1 + RANK, **arguments), **options)
    model.compile(optimizer)
    hvdtrain.broadcast(model)
    weights = model.trainable_variables
    with pytest.raises(DisagreementError, match=f"same arguments of the optimizer. Received: {found}"):
        optimizer.apply([tf.zeros(each.shape) for each in weights], weights)


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


def test_float8_is_refused_in_one_line():
    model = keras.Sequential([layers.Input((16,)), layers.Dense(16)])
    model.quantize("float8")
    with pytest.raises(UsageError, match="float8 is not supported on several ranks"):
        fit(model, x=np.repeat(X[:, :1], 16, 1), y=np.repeat(Y, 16, 1))
