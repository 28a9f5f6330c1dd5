"""On all ranks: unreadable samples, losses and gradients that are not finite, and overflows, on any one of them."""

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from models import NUM_CLASSES, relative_difference, values
from trainers import make_trainer
from trainings import (
    COLLECTIVES,
    GLOBAL_BATCH,
    RANK,
    SIZE,
    STEPS,
    Warnings,
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

from hvdtrain.data import Arrays, TFRecords
from hvdtrain.data.record_index import index_records
from hvdtrain.distributed import bounded_messages, gradient_buckets
from hvdtrain.errors import JobError, NonFiniteError
from hvdtrain.training import gradient_checks

# The number of the first sample in the last file of write_records().
LAST_FILE_START = 107


def accumulating(gradient_accumulation_steps: int) -> dict[str, int]:
    """The argument of an optimizer; Keras takes no 1."""
    if gradient_accumulation_steps == 1:
        return {}
    return {"gradient_accumulation_steps": gradient_accumulation_steps}


def damage(paths, records) -> None:
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


@pytest.mark.parametrize(
    ("gradient_accumulation_steps", "steps_per_execution"),
    [pytest.param(1, 1, marks=pytest.mark.long), pytest.param(1, 4, marks=pytest.mark.long), (2, 2)],
)
def test_unreadable_records_are_skipped(gradient_accumulation_steps, steps_per_execution, folder):
    """The rank that finds one restarts its input without it while the others wait in the reduction."""
    paths = write_records(folder)
    damage(paths, [5, 90])
    source = TFRecords(paths, parse, cache_dir=folder / "cache")
    ours, summary = trained(
        tanh_model,
        keras.optimizers.SGD(0.1, **accumulating(gradient_accumulation_steps)),
        source,
        gradient_accumulation_steps=gradient_accumulation_steps,
        steps_per_execution=steps_per_execution,
        bad_samples=2,
    )
    assert summary["bad_samples"] == 2
    assert_equal_replicas(ours)
    # The mean of a step is that of its other samples.
    theirs = compiled(tanh_model, keras.optimizers.SGD(0.1))
    bad = {LAST_FILE_START + 5, LAST_FILE_START + 90}
    step = epoch = 0
    while step < STEPS:
        order = np.random.Generator(np.random.Philox([5, epoch])).permutation(len(X))
        for first in range(0, len(X), GLOBAL_BATCH):
            if step < STEPS:
                batch = order[first : first + GLOBAL_BATCH]
                readable = np.array([n for n in batch if n not in bad])
                theirs.train_on_batch(X[readable], Y[readable])
            step += 1
        epoch += 1
    assert relative_difference(values(ours.weights), values(theirs.weights)) < 1e-5


@pytest.mark.parametrize("on_rank", sorted({0, SIZE - 1}))
@pytest.mark.parametrize("gradient_accumulation_steps", [1, 2])
def test_a_nan_in_one_ranks_input_is_reported_on_all_ranks(on_rank, gradient_accumulation_steps):
    x = X.copy()
    order = np.random.Generator(np.random.Philox([5, 0])).permutation(len(X))
    # The first sample of a rank's (first) part in step 3.
    part = GLOBAL_BATCH // SIZE // gradient_accumulation_steps
    x[order[2 * GLOBAL_BATCH + on_rank * part]] = np.nan
    model = compiled(tanh_model, keras.optimizers.SGD(0.1, **accumulating(gradient_accumulation_steps)))
    trainer = make_trainer(
        model,
        Arrays(x, Y),
        batch_size=part,
        steps=STEPS,
        seed=5,
        gradient_accumulation_steps=gradient_accumulation_steps,
        steps_per_execution=5,
    )
    with pytest.raises(NonFiniteError, match=rf"At step 3: .* on rank {on_rank} .*not finite") as caught:
        trainer.fit()
    assert "the loss on rank" in str(caught.value)
    assert all(np.isfinite(each).all() for each in values(model.weights))
    assert_equal_replicas(model)


@pytest.mark.parametrize("on_rank", sorted({0, SIZE - 1}))
@pytest.mark.parametrize("on_nan", ["stop", "skip"])
def test_a_non_finite_loss_with_a_finite_gradient(on_rank, on_nan):
    """The other ranks learn of it only by the NaN that is written into the gradient."""
    part = GLOBAL_BATCH // SIZE
    order = np.random.Generator(np.random.Philox([5, 0])).permutation(len(X))
    marked = Y.astype(np.float32)
    marked[order[2 * GLOBAL_BATCH + on_rank * part]] = 1e9

    def infinite_where_marked(y_true, y_pred):
        infinity = tf.where(tf.reshape(y_true, [-1]) > 1e6, np.float32(np.inf), 0.0)
        return tf.reduce_sum(y_pred**2, -1) + tf.stop_gradient(infinity)

    model = compiled(tanh_model, keras.optimizers.SGD(0.1))
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss=infinite_where_marked)
    trainer = make_trainer(model, Arrays(X, marked), batch_size=part, steps=6, seed=5, on_nan=on_nan)
    if on_nan == "stop":
        with pytest.raises(NonFiniteError, match=rf"At step 3: the loss on rank {on_rank} is not finite"):
            trainer.fit()
    else:
        assert trainer.fit()["skipped_steps"] == 1
    assert_equal_replicas(model)


class BrokenGradient(keras.layers.Layer):
    """The identity; its gradient is infinite where the input is above a bound."""

    def call(self, inputs):
        @tf.custom_gradient
        def identity(x):
            return tf.identity(x), lambda upstream: tf.where(x > 1e3, np.float32(np.inf), upstream)

        return identity(inputs)


@pytest.mark.parametrize("is_large", [False, True])
def test_a_non_finite_gradient_is_named_with_its_variable(is_large, monkeypatch):
    """Also if gradients are so large that they are not kept until the step is known to be finite."""
    if is_large:
        monkeypatch.setattr(gradient_checks, "HELD_BYTES", 0)
        monkeypatch.setattr(bounded_messages, "PIECE_BYTES", 64)
        monkeypatch.setattr(gradient_buckets, "BUCKET_BYTES", 1)
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
        make_trainer(model, Arrays(x, Y), batch_size=GLOBAL_BATCH // SIZE, steps=4, seed=5).fit()
    assert f"'before/kernel' on rank {SIZE - 1}" in str(caught.value)
    assert "after" not in str(caught.value)
    assert "At step 2:" in str(caught.value)


@pytest.mark.parametrize("gradient_accumulation_steps", [pytest.param(1, marks=pytest.mark.long), 2])
def test_all_ranks_skip_the_same_step(gradient_accumulation_steps):
    """A skipped step changes no momentum, weight decay, EMA or BatchNormalization either."""
    x = X.copy()
    order = np.random.Generator(np.random.Philox([5, 0])).permutation(len(X))
    bad_step = 3
    x[order[(bad_step - 1) * GLOBAL_BATCH + 1]] = np.inf
    shared = {"learning_rate": 0.1, "momentum": 0.9, "weight_decay": 0.01, "use_ema": True, "ema_momentum": 0.5}
    optimizer = keras.optimizers.SGD(**shared, **accumulating(gradient_accumulation_steps))
    model = compiled(batchnorm_model, optimizer, seed=100 + RANK)
    warnings = Warnings()
    summary = make_trainer(
        model,
        Arrays(x, Y),
        batch_size=GLOBAL_BATCH // SIZE // gradient_accumulation_steps,
        steps=7,
        seed=5,
        gradient_accumulation_steps=gradient_accumulation_steps,
        on_nan="skip",
        sync_batchnorm=True,
        guard_every=4,
        reporter=warnings,
    ).fit()
    assert summary["skipped_steps"] == 1
    assert len(warnings.received) == 1
    # The culprits of the skipped step, although others followed it; synchronized statistics carry it to all ranks.
    assert "the loss on rank 0" in warnings.received[0][1]
    assert np.isfinite(summary["loss"])
    assert_equal_replicas(model)
    if gradient_accumulation_steps == 1:
        theirs = compiled(batchnorm_model, keras.optimizers.SGD(**shared))
        for step in range(7):
            if step != bad_step - 1:
                batch = order[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH]
                theirs.train_on_batch(x[batch], Y[batch])
        theirs.optimizer.finalize_variable_values(theirs.trainable_variables)
        assert relative_difference(values(model.weights), values(theirs.weights)) < 1e-5


def test_an_overflow_on_one_rank_halves_the_loss_scale_on_all_ranks():
    """One sample of one rank overflows float16: no deadlock, all scales are halved, weights stay equal."""
    x = X.copy()
    order = np.random.Generator(np.random.Philox([5, 0])).permutation(len(X))
    x[order[GLOBAL_BATCH + (SIZE - 1) * (GLOBAL_BATCH // SIZE)]] = 1e30  # infinite in float16
    with dtype_policy("mixed_float16"):
        model = compiled(tanh_model, keras.optimizers.SGD(0.1))
    summary = make_trainer(model, Arrays(x, Y), batch_size=GLOBAL_BATCH // SIZE, steps=6, seed=5).fit()
    assert summary["skipped_steps"] >= 1
    scales = COLLECTIVES.allgather(float(model.optimizer.dynamic_scale))
    assert scales == [model.optimizer.initial_scale / 2 ** summary["skipped_steps"]] * SIZE
    assert np.isfinite(summary["loss"])
    assert_equal_replicas(model)


# Steps per call, and the step at which a guard that is due every 2 steps runs after step 3.
GUARD_CALLS = [(1, 4), (3, 3)]


@pytest.mark.parametrize(("steps_per_execution", "guard_step"), GUARD_CALLS)
def test_skipped_steps_are_reported_at_the_guard_interval(steps_per_execution, guard_step):
    """Not at the log interval, which may be long, and not only at the end."""
    x = X.copy()
    order = np.random.Generator(np.random.Philox([5, 0])).permutation(len(X))
    x[order[2 * GLOBAL_BATCH]] = np.nan  # step 3, rank 0
    warnings = Warnings()
    trainer = make_trainer(
        compiled(tanh_model, keras.optimizers.SGD(0.1)),
        Arrays(x, Y),
        batch_size=GLOBAL_BATCH // SIZE,
        steps=8,
        seed=5,
        steps_per_execution=steps_per_execution,
        on_nan="skip",
        log_every=1000,
        guard_every=2,
        reporter=warnings,
    )
    assert trainer.fit()["skipped_steps"] == 1
    text = "1 step(s) skipped so far on every rank; the last: the loss on rank 0 is not finite"
    assert warnings.received == [(guard_step, text)]


@pytest.mark.parametrize(("steps_per_execution", "guard_step"), GUARD_CALLS)
def test_the_quota_of_bad_samples_ends_the_job_at_the_guard_interval(steps_per_execution, guard_step, folder):
    """Two ranks skip one sample each: no rank alone exceeds the quota of one."""
    part = GLOBAL_BATCH // SIZE
    order = np.random.Generator(np.random.Philox([5, 0])).permutation(len(X))
    own = [order[2 * GLOBAL_BATCH + rank * part :][:part] for rank in (0, SIZE - 1)]  # step 3
    records = [next(number for number in numbers if number >= LAST_FILE_START) - LAST_FILE_START for numbers in own]
    paths = write_records(folder)
    damage(paths, records)
    trainer = make_trainer(
        compiled(tanh_model, keras.optimizers.SGD(0.1)),
        TFRecords(paths, parse, cache_dir=folder / "cache"),
        batch_size=part,
        steps=8,
        seed=5,
        steps_per_execution=steps_per_execution,
        bad_samples=1,
        log_every=1000,
        guard_every=2,
    )
    with pytest.raises(JobError, match=r"the number of unreadable samples must be at most 1\. Received: 2") as caught:
        trainer.fit()
    assert caught.value.exit_code == 65
    assert trainer.step == guard_step
