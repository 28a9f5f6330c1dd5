"""On every rank: each option of synchronous training makes the updates of one process, and guards end all alike."""

import contextlib
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from models import NUM_CLASSES, dense_model, loss, relative_difference, samples, values
from one_process import train_alone

import hvdtrain
from hvdtrain import runtime
from hvdtrain.data import Arrays, Stream, TFRecords
from hvdtrain.data.record_index import index_records
from hvdtrain.errors import NonFiniteError, UsageError
from hvdtrain.report import Reporter

TOPOLOGY = hvdtrain.init(seed=0, deterministic=True)
RANK, SIZE = TOPOLOGY.rank, TOPOLOGY.size
COLLECTIVES = runtime.current().collectives
GLOBAL_BATCH = 32
STEPS = 24
# 245 = 7 * 32 + 21: the last step of an epoch divides by no number of ranks.
X, Y = samples(245, seed=1)


def assert_equal_replicas(model: keras.Model) -> None:
    mine = values(model.weights) + values(model.optimizer.variables)
    for theirs in COLLECTIVES.allgather(mine):
        assert all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))


def tanh_model() -> keras.Model:
    return keras.Sequential([layers.Input((6,)), layers.Dense(16, activation="tanh"), layers.Dense(NUM_CLASSES)])


def batchnorm_model() -> keras.Model:
    return keras.Sequential(
        [
            layers.Input((6,)),
            layers.Dense(16, use_bias=False),  # a bias would be taken off again: its gradient is rounding alone
            layers.BatchNormalization(momentum=0.9),
            layers.Activation("tanh"),
            layers.Dense(NUM_CLASSES),
        ]
    )


def regularized_model() -> keras.Model:
    l2 = keras.regularizers.L2(0.05)
    dense = layers.Dense(16, activation="tanh", kernel_regularizer=l2)
    return keras.Sequential([layers.Input((6,)), dense, layers.Dense(NUM_CLASSES)])


def compiled(make_model, optimizer, seed: int = 100) -> keras.Model:
    keras.utils.set_random_seed(seed)
    model = make_model()
    model.compile(optimizer=optimizer, loss=loss(), metrics=["accuracy"])
    return model


def trained(make_model, optimizer, source=None, **options) -> tuple[keras.Model, dict]:
    # Other initial weights on each rank: the broadcast mends them.
    model = compiled(make_model, optimizer, seed=100 + RANK)
    accumulate = options.get("accumulate", 1)
    arguments = {"batch_size": GLOBAL_BATCH // SIZE // accumulate, "steps": STEPS, "seed": 5, **options}
    return model, hvdtrain.Trainer(model, source or Arrays(X, Y), **arguments).fit()


def alone(make_model, optimizer, *, shuffle: bool = True) -> keras.Model:
    model = compiled(make_model, optimizer)
    train_alone(model, X, Y, global_batch=GLOBAL_BATCH, seed=5, steps=STEPS, shuffle=shuffle)
    model.optimizer.finalize_variable_values(model.trainable_variables)  # as model.fit does at its end
    return model


SGD, ADAM = keras.optimizers.SGD, keras.optimizers.Adam
AVERAGE = {"learning_rate": 0.1, "use_ema": True, "ema_momentum": 0.8}
TABLE = {
    "accumulation": (tanh_model, ADAM, {"learning_rate": 0.01}, {"accumulate": 4}),
    "global norm": (tanh_model, SGD, {"learning_rate": 0.5, "global_clipnorm": 0.05}, {}),
    "clip by value": (tanh_model, SGD, {"learning_rate": 0.5, "clipvalue": 0.01}, {}),
    "weight decay": (tanh_model, SGD, {"learning_rate": 0.1, "weight_decay": 0.1}, {}),
    "regularizer": (regularized_model, SGD, {"learning_rate": 0.1}, {"accumulate": 2}),
    "average of weights": (tanh_model, SGD, AVERAGE, {}),
    "average of weights, accumulation": (tanh_model, SGD, AVERAGE, {"accumulate": 2, "steps_per_call": 3}),
    "ten steps a call": (tanh_model, ADAM, {"learning_rate": 0.01}, {"steps_per_call": 10, "log_every": 11}),
    "groups": (tanh_model, ADAM, {"learning_rate": 0.01}, {"groups": 2}),
    "BatchNormalization": (batchnorm_model, SGD, {"learning_rate": 0.1}, {"sync_batchnorm": True}),
    "BatchNormalization, ten steps a call": (
        batchnorm_model,
        ADAM,
        {"learning_rate": 0.01},
        {"sync_batchnorm": True, "steps_per_call": 10},
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_equals_one_process(name):
    make_model, make_optimizer, options, training = TABLE[name]
    training = dict(training)
    accumulate = {"gradient_accumulation_steps": training["accumulate"]} if "accumulate" in training else {}
    optimizer = make_optimizer(**options, **accumulate)
    if "groups" in training:
        optimizer = hvdtrain.DistributedOptimizer(optimizer, groups=training.pop("groups"))
    ours, summary = trained(make_model, optimizer, **training)
    theirs = alone(make_model, make_optimizer(**options))
    assert summary["steps"] == STEPS
    assert relative_difference(values(ours.weights), values(theirs.weights)) < 1e-5
    assert_equal_replicas(ours)


def write_records(folder) -> list[str]:
    """The samples in three files of unequal length, one of them compressed; written by rank 0 for all."""
    paths = [str(folder / f"part-{i}.tfrecord{'.gz' if i == 1 else ''}") for i in range(3)]
    if RANK == 0:
        for i, (first, last) in enumerate(((0, 100), (100, 107), (107, len(X)))):
            with tf.io.TFRecordWriter(paths[i], tf.io.TFRecordOptions("GZIP" if i == 1 else "")) as writer:
                for x, y in zip(X[first:last], Y[first:last], strict=True):
                    features = {
                        "x": tf.train.Feature(float_list=tf.train.FloatList(value=x)),
                        "y": tf.train.Feature(int64_list=tf.train.Int64List(value=[y])),
                    }
                    example = tf.train.Example(features=tf.train.Features(feature=features))
                    writer.write(example.SerializeToString())
    COLLECTIVES.barrier()
    return paths


def parse(serialized):
    parsed = tf.io.parse_single_example(
        serialized, {"x": tf.io.FixedLenFeature([6], tf.float32), "y": tf.io.FixedLenFeature([], tf.int64)}
    )
    return parsed["x"], tf.cast(parsed["y"], tf.int32)


@pytest.fixture
def shared_folder(tmp_path):
    return Path(COLLECTIVES.allgather(str(tmp_path))[0])


def test_tfrecords_equal_one_process(shared_folder):
    source = TFRecords(write_records(shared_folder), parse, cache_dir=shared_folder / "cache")
    ours, _ = trained(tanh_model, keras.optimizers.Adam(0.01), source, steps_per_call=10)
    theirs = alone(tanh_model, keras.optimizers.Adam(0.01))
    assert relative_difference(values(ours.weights), values(theirs.weights)) < 1e-5
    assert_equal_replicas(ours)


def test_a_data_set_equals_one_process():
    source = Stream(tf.data.Dataset.from_tensor_slices((X, Y)))
    ours, _ = trained(tanh_model, keras.optimizers.Adam(0.01), source)
    theirs = alone(tanh_model, keras.optimizers.Adam(0.01), shuffle=False)
    assert relative_difference(values(ours.weights), values(theirs.weights)) < 1e-5


def damaged(paths, shared_folder, records) -> None:
    """Flips a byte in the data of some records of the last file; rank 0 does it for all."""
    if RANK == 0:
        index = index_records(Path(paths[2]))
        with open(paths[2], "r+b") as file:
            for record in records:
                position = int(index.offsets[record]) + 12 + 3
                file.seek(position)
                byte = file.read(1)
                file.seek(position)
                file.write(bytes([byte[0] ^ 0xFF]))
    COLLECTIVES.barrier()


@pytest.mark.parametrize(("accumulate", "steps_per_call"), [(1, 1), (1, 4), (2, 2)])
def test_unreadable_records_are_left_out_and_training_goes_on(accumulate, steps_per_call, shared_folder):
    """The rank that meets one mends its own input while the others wait in the reduction."""
    paths = write_records(shared_folder)
    damaged(paths, shared_folder, [5, 90])
    source = TFRecords(paths, parse, cache_dir=shared_folder / "cache")
    options = {"gradient_accumulation_steps": accumulate} if accumulate > 1 else {}
    ours, summary = trained(
        tanh_model,
        keras.optimizers.SGD(0.1, **options),
        source,
        accumulate=accumulate,
        steps_per_call=steps_per_call,
        bad_samples=2,
    )
    assert summary["bad_samples"] == 2
    assert_equal_replicas(ours)
    # As if each bad sample had been left out of its step's sum, which is divided as ever.
    theirs = compiled(tanh_model, keras.optimizers.SGD(0.1))
    bad = {107 + 5, 107 + 90}
    step = epoch = 0
    while step < STEPS:
        order = np.random.Generator(np.random.Philox([5, epoch])).permutation(len(X))
        for first in range(0, len(X), GLOBAL_BATCH):
            if step < STEPS:
                batch = order[first : first + GLOBAL_BATCH]
                weights = np.array([0.0 if n in bad else 1.0 for n in batch], np.float32)
                theirs.train_on_batch(X[batch], Y[batch], sample_weight=weights)
            step += 1
        epoch += 1
    assert relative_difference(values(ours.weights), values(theirs.weights)) < 1e-5


@pytest.mark.parametrize("on_rank", sorted({0, SIZE - 1}))
@pytest.mark.parametrize("accumulate", [1, 2])
def test_nan_in_one_ranks_input_is_named_everywhere(on_rank, accumulate):
    x = X.copy()
    order = np.random.Generator(np.random.Philox([5, 0])).permutation(len(X))
    # The first sample of a rank's (first) part in step 3.
    part = GLOBAL_BATCH // SIZE // accumulate
    x[order[2 * GLOBAL_BATCH + on_rank * part]] = np.nan
    options = {"gradient_accumulation_steps": accumulate} if accumulate > 1 else {}
    model = compiled(tanh_model, keras.optimizers.SGD(0.1, **options))
    trainer = hvdtrain.Trainer(
        model, Arrays(x, Y), batch_size=part, steps=STEPS, seed=5, accumulate=accumulate, steps_per_call=5
    )
    with pytest.raises(NonFiniteError, match=rf"At step 3: .* on rank {on_rank} .*not finite") as caught:
        trainer.fit()
    if accumulate == 1:
        assert "the loss on rank" in str(caught.value)
    assert all(np.isfinite(each).all() for each in values(model.weights))
    assert_equal_replicas(model)


@pytest.mark.parametrize("on_rank", sorted({0, SIZE - 1}))
@pytest.mark.parametrize("on_nan", ["stop", "skip"])
def test_a_loss_that_is_not_finite_though_its_gradient_is(on_rank, on_nan):
    """Only what is written into the gradient tells the other ranks."""
    part = GLOBAL_BATCH // SIZE
    order = np.random.Generator(np.random.Philox([5, 0])).permutation(len(X))
    marked = Y.astype(np.float32)
    marked[order[2 * GLOBAL_BATCH + on_rank * part]] = 1e9

    def infinite_where_marked(y_true, y_pred):
        infinity = tf.where(tf.reshape(y_true, [-1]) > 1e6, np.float32(np.inf), 0.0)
        return tf.reduce_sum(y_pred**2, -1) + tf.stop_gradient(infinity)

    model = compiled(tanh_model, keras.optimizers.SGD(0.1))
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss=infinite_where_marked)
    trainer = hvdtrain.Trainer(model, Arrays(X, marked), batch_size=part, steps=6, seed=5, on_nan=on_nan)
    if on_nan == "stop":
        with pytest.raises(NonFiniteError, match=rf"At step 3: the loss on rank {on_rank} is not finite"):
            trainer.fit()
    else:
        assert trainer.fit()["skipped_steps"] == 1
    assert_equal_replicas(model)


class BrokenGradient(keras.layers.Layer):
    """Its output is what came in; its gradient is infinite where the input is above a bound."""

    def call(self, inputs):
        @tf.custom_gradient
        def identity(x):
            return tf.identity(x), lambda upstream: tf.where(x > 1e3, np.float32(np.inf), upstream)

        return identity(inputs)


def test_a_gradient_that_is_not_finite_is_named_with_its_variable():
    x = X.copy()
    order = np.random.Generator(np.random.Philox([5, 0])).permutation(len(X))
    x[order[GLOBAL_BATCH + (SIZE - 1) * (GLOBAL_BATCH // SIZE)]] = 1e4

    def make() -> keras.Model:
        inputs = layers.Input((6,))
        hidden = layers.Dense(6, name="before", kernel_initializer="identity")(inputs)
        hidden = layers.Activation("tanh")(BrokenGradient()(hidden))
        return keras.Model(inputs, layers.Dense(NUM_CLASSES, name="after")(hidden))

    model = compiled(make, keras.optimizers.SGD(0.0))
    with pytest.raises(NonFiniteError) as caught:
        hvdtrain.Trainer(model, Arrays(x, Y), batch_size=GLOBAL_BATCH // SIZE, steps=4, seed=5).fit()
    assert f"'before/kernel' on rank {SIZE - 1}" in str(caught.value)
    assert "after" not in str(caught.value)
    assert "At step 2:" in str(caught.value)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_skip_makes_every_rank_skip_the_same_step(accumulate):
    """Also momentum, weight decay, the average of weights and BatchNormalization are as if the step had not been."""
    x = X.copy()
    order = np.random.Generator(np.random.Philox([5, 0])).permutation(len(X))
    bad_step = 3
    x[order[(bad_step - 1) * GLOBAL_BATCH + 1]] = np.inf
    shared = {"learning_rate": 0.1, "momentum": 0.9, "weight_decay": 0.01, "use_ema": True, "ema_momentum": 0.5}
    options = {"gradient_accumulation_steps": accumulate} if accumulate > 1 else {}
    model = compiled(batchnorm_model, keras.optimizers.SGD(**shared, **options), seed=100 + RANK)
    told = []

    class Told(Reporter):
        def warned(self, step, text):
            told.append((step, text))

    summary = hvdtrain.Trainer(
        model,
        Arrays(x, Y),
        batch_size=GLOBAL_BATCH // SIZE // accumulate,
        steps=7,
        seed=5,
        accumulate=accumulate,
        on_nan="skip",
        sync_batchnorm=True,
        log_every=4,
        reporter=Told(),
    ).fit()
    assert summary["skipped_steps"] == 1
    assert len(told) == 1
    assert "on rank 0 " in told[0][1]
    assert np.isfinite(summary["loss"])
    assert_equal_replicas(model)
    if accumulate == 1:
        theirs = compiled(batchnorm_model, keras.optimizers.SGD(**shared))
        for step in range(7):
            if step != bad_step - 1:
                batch = order[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH]
                theirs.train_on_batch(x[batch], Y[batch])
        theirs.optimizer.finalize_variable_values(theirs.trainable_variables)
        assert relative_difference(values(model.weights), values(theirs.weights)) < 1e-5


@contextlib.contextmanager
def dtype_policy(name: str):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision_keeps_replicas_equal(policy):
    with dtype_policy(policy):
        model, _ = trained(tanh_model, keras.optimizers.SGD(0.1))
        theirs = alone(tanh_model, keras.optimizers.SGD(0.1))
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer) == (policy == "mixed_float16")
    assert_equal_replicas(model)
    assert relative_difference(values(model.weights), values(theirs.weights)) < 0.05


def test_overflow_on_one_rank_halves_every_ranks_scale():
    """One sample of one rank overflows float16: no deadlock, both scales halve, weights stay equal."""
    x = X.copy()
    order = np.random.Generator(np.random.Philox([5, 0])).permutation(len(X))
    x[order[GLOBAL_BATCH + (SIZE - 1) * (GLOBAL_BATCH // SIZE)]] = 1e30  # infinite in float16
    with dtype_policy("mixed_float16"):
        model = compiled(tanh_model, keras.optimizers.SGD(0.1))
    summary = hvdtrain.Trainer(model, Arrays(x, Y), batch_size=GLOBAL_BATCH // SIZE, steps=6, seed=5).fit()
    assert summary["skipped_steps"] >= 1
    scales = COLLECTIVES.allgather(float(model.optimizer.dynamic_scale))
    assert scales == [model.optimizer.initial_scale / 2 ** summary["skipped_steps"]] * SIZE
    assert np.isfinite(summary["loss"])
    assert_equal_replicas(model)


def adasum(gradients: list[np.ndarray]) -> np.ndarray:
    """Maleki et al., arXiv:2006.02924, equation 8, over pairs, then pairs of pairs."""
    if len(gradients) == 1:
        return gradients[0]
    half = len(gradients) // 2
    a, b = adasum(gradients[:half]), adasum(gradients[half:])
    dot = float((a * b).sum())
    return (1 - dot / (2 * float((a * a).sum()))) * a + (1 - dot / (2 * float((b * b).sum()))) * b


def test_adasum():
    rng = np.random.default_rng(RANK)
    own = [rng.normal(size=(5, 3)).astype(np.float32), rng.normal(size=7).astype(np.float32)]
    reduce = COLLECTIVES.gradient_reducer(name="a", op="adasum", compression="none", groups=None, sparse_as_dense=False)
    reduced = [each.numpy() for each in reduce([tf.constant(each) for each in own])]
    everyone = COLLECTIVES.allgather(own)
    for i, each in enumerate(reduced):
        assert each == pytest.approx(adasum([rank[i] for rank in everyone]), rel=1e-4, abs=1e-5)
    optimizer = hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.1), op="adasum")
    model, summary = trained(tanh_model, optimizer)
    assert_equal_replicas(model)
    assert np.isfinite(summary["loss"])


def test_what_fp16_loses_is_shown():
    model, summary = trained(tanh_model, hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.1), compression="fp16"))
    assert 1e-6 < summary["compression_error"] < 1e-2
    assert_equal_replicas(model)
    assert trained(tanh_model, keras.optimizers.SGD(0.1))[1]["compression_error"] is None


def test_synchronised_batchnorm_forward_and_backward():
    """Outputs and gradients on each rank's part are those of the whole batch, uneven parts and masks included."""
    rng = np.random.default_rng(3)
    whole = rng.normal(3.0, 2.0, size=(SIZE * 5 + 1, 4, 3)).astype(np.float32)
    mask = rng.random((len(whole), 4)) > 0.3
    upstream = rng.normal(size=whole.shape).astype(np.float32)
    cuts = [0, *(5 * (rank + 1) for rank in range(SIZE - 1)), len(whole)]
    mine = slice(cuts[RANK], cuts[RANK + 1])

    def make():
        layer = layers.BatchNormalization(momentum=0.5, synchronized=True)
        return layer, keras.Sequential([layers.Input((4, 3)), layer])

    def run(layer, part, kept):
        x = tf.constant(whole[part])
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True, mask=None if kept is None else kept[part])
            total = tf.reduce_sum(y * upstream[part])
        return y.numpy(), tape.gradient(total, x).numpy()

    for kept in (None, mask):
        layer, model = make()
        assert hvdtrain.synchronize_batch_normalization(model) == 1
        plain_layer, _ = make()
        y, gradient = run(layer, mine, kept)
        expected_y, expected_gradient = run(plain_layer, slice(None), kept)
        assert y == pytest.approx(expected_y[mine], abs=2e-5)
        assert gradient == pytest.approx(expected_gradient[mine], abs=2e-5)
        assert layer.moving_mean.numpy() == pytest.approx(plain_layer.moving_mean.numpy(), abs=1e-5)
        assert layer.moving_variance.numpy() == pytest.approx(plain_layer.moving_variance.numpy(), abs=1e-5)


def test_a_rank_without_a_sample_of_its_own_counts_for_nothing_in_batchnorm():
    whole = np.random.default_rng(3).normal(3.0, 2.0, size=(SIZE * 5, 3)).astype(np.float32)
    layer = layers.BatchNormalization(momentum=0.5)
    model = keras.Sequential([layers.Input((3,)), layer])
    is_filler = RANK == 0 and SIZE > 1
    hvdtrain.synchronize_batch_normalization(model, part_weight=lambda: tf.constant(0.0 if is_filler else 1.0))
    layer(tf.constant(whole[5 * RANK : 5 * RANK + 5]), training=True)
    counted = whole[5:] if SIZE > 1 else whole
    assert layer.moving_mean.numpy() == pytest.approx(0.5 * counted.mean(0), rel=1e-4)
    assert layer.moving_variance.numpy() == pytest.approx(0.5 + 0.5 * counted.var(0), rel=1e-4)


def test_fewer_samples_in_the_last_step_than_ranks():
    x, y = X[: 7 * GLOBAL_BATCH + max(1, SIZE - 1)], Y[: 7 * GLOBAL_BATCH + max(1, SIZE - 1)]
    ours, _ = trained(batchnorm_model, SGD(0.1), Arrays(x, y), sync_batchnorm=True)
    theirs = compiled(batchnorm_model, SGD(0.1))
    train_alone(theirs, x, y, global_batch=GLOBAL_BATCH, seed=5, steps=STEPS)
    assert_equal_replicas(ours)
    assert relative_difference(values(ours.weights), values(theirs.weights)) < 1e-5


def test_losses_that_cannot_be_averaged_are_refused():
    model = dense_model()
    summed = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    model.compile(optimizer="sgd", loss=summed)
    with pytest.raises(UsageError, match="op='sum'"):
        hvdtrain.Trainer(model, Arrays(X, Y), batch_size=4, steps=1)
    ours = compiled(tanh_model, "sgd", seed=100 + RANK)
    ours.compile(optimizer=hvdtrain.DistributedOptimizer(keras.optimizers.SGD(1e-3), op="sum"), loss=summed)
    hvdtrain.Trainer(ours, Arrays(X, Y), batch_size=GLOBAL_BATCH // SIZE, steps=STEPS, seed=5).fit()
    theirs = compiled(tanh_model, "sgd")
    theirs.compile(optimizer=keras.optimizers.SGD(1e-3), loss=summed)
    train_alone(theirs, X, Y, global_batch=GLOBAL_BATCH, seed=5, steps=STEPS)
    assert relative_difference(values(ours.weights), values(theirs.weights)) < 1e-5
