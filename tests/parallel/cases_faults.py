"""On every rank: what one rank cannot read, and what is not finite there, is met by all alike."""

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from models import NUM_CLASSES, relative_difference, values
from trainings import (
    COLLECTIVES,
    GLOBAL_BATCH,
    RANK,
    SIZE,
    STEPS,
    X,
    Y,
    assert_equal_replicas,
    batchnorm_model,
    compiled,
    dtype_policy,
    parse,
    tanh_model,
    trained,
    write_records,
)

import hvdtrain
from hvdtrain.data import Arrays, TFRecords
from hvdtrain.data.record_index import index_records
from hvdtrain.errors import NonFiniteError
from hvdtrain.report import Reporter


@pytest.fixture
def shared_folder(tmp_path):
    return Path(COLLECTIVES.allgather(str(tmp_path))[0])


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
    # Of the step that was skipped, though others came after it; synchronised statistics carry it to every rank.
    assert "the loss on rank 0" in told[0][1]
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
