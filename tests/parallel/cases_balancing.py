"""On all ranks: however the samples of a step are divided, the updates are those of one process."""

import functools
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from models import NUM_CLASSES, SHARED_GPUS, loss, relative_difference, samples, values
from one_process import train_alone
from trainers import make_trainer

import hvdtrain
from hvdtrain.data import Arrays, Stream
from hvdtrain.distributed import runtime
from hvdtrain.errors import StoppedEarly

TOPOLOGY = hvdtrain.init(seed=0, gpus=SHARED_GPUS)
RANK, SIZE = TOPOLOGY.rank, TOPOLOGY.size
COLLECTIVES = runtime.current().collectives
GLOBAL_BATCH = 16 * SIZE
STEPS = 60
X, Y = samples(7 * GLOBAL_BATCH + 5, seed=1)
# No step is uneven until a decision makes it so.
EVEN_X, EVEN_Y = X[: 7 * GLOBAL_BATCH], Y[: 7 * GLOBAL_BATCH]


class Pause(layers.Layer):
    """Takes some time for each sample."""

    def __init__(self, seconds_per_sample):
        super().__init__()
        self.seconds_per_sample = seconds_per_sample
        self.batch_sizes = []
        self.num_traces = 0

    def call(self, x):
        self.num_traces += not tf.executing_eagerly()

        def pause(rows):
            self.batch_sizes.append(len(rows))
            time.sleep(len(rows) * self.seconds_per_sample)
            return rows

        @tf.custom_gradient
        def slow(x):
            y = tf.numpy_function(pause, [x], x.dtype)
            y.set_shape(x.shape)
            return y, lambda upstream: upstream

        return slow(x)


@pytest.fixture(autouse=True, scope="module")
def _double_precision():
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


def make_model(seed: int, *pause: layers.Layer, **optimizer) -> keras.Model:
    keras.utils.set_random_seed(seed)
    hidden = layers.Dense(16, activation="tanh")
    model = keras.Sequential([layers.Input((6,)), *pause, hidden, layers.Dense(NUM_CLASSES)])
    model.compile(keras.optimizers.Adam(0.01, global_clipnorm=0.5, **optimizer), loss(), metrics=["accuracy"])
    return model


@functools.cache
def alone(*, even: bool = False, shuffle: bool = True) -> list[np.ndarray]:
    model, (x, y) = make_model(100), (EVEN_X, EVEN_Y) if even else (X, Y)
    train_alone(model, x, y, global_batch=GLOBAL_BATCH, seed=5, steps=STEPS, shuffle=shuffle)
    return values(model.weights)


def trainer_of(model, source=None, **options) -> hvdtrain.Trainer:
    options = {"batch_size": 16, "steps": STEPS, "seed": 5, **options}
    return make_trainer(model, source or Arrays(X, Y), **options)


# Seconds per sample: long enough for a step to show them on a busy machine.
SLOW, FAST = 1.6e-3, 4e-4


def pause_of_first_rank() -> Pause:
    """One rank takes four times as long as the others for a sample."""
    return Pause(SLOW if RANK == 0 else FAST)


def assert_equals_one_process(model, **options) -> None:
    ours = values(model.weights)
    assert relative_difference(ours, alone(**options)) < 1e-10
    for theirs in COLLECTIVES.allgather(ours):
        assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 2},
        pytest.param({}, marks=pytest.mark.long),
        pytest.param({"steps_per_execution": 3}, marks=pytest.mark.long),
    ],
)
def test_a_slow_rank_gets_fewer_samples_and_the_updates_are_those_of_one_process(options):
    pause = pause_of_first_rank()
    accumulation = options.get("gradient_accumulation_steps", 1)
    model = make_model(100 + RANK, pause, gradient_accumulation_steps=accumulation if accumulation > 1 else None)
    data = Arrays(EVEN_X, EVEN_Y)
    trainer = trainer_of(model, data, batch_size=16 // accumulation, balance=True, balance_every=8, **options)
    summary = trainer.fit()
    sizes = summary["rank_batch_sizes"]
    assert sum(sizes) * accumulation == GLOBAL_BATCH
    assert sizes[0] < min(sizes[1:]) / 2
    assert summary["batch_size_changes"] >= 1
    # The metrics are computed before the first step, and the step is traced once: not again for other batches.
    assert pause.num_traces <= 3
    assert_equals_one_process(model, even=True)
    assert len(set(COLLECTIVES.allgather(str(sizes)))) == 1


@pytest.mark.long
def test_a_rank_that_is_50_times_slower_keeps_few_samples():
    pause = Pause(50 * FAST if RANK == 0 else FAST)
    model = make_model(100 + RANK, pause)
    summary = trainer_of(model, Arrays(EVEN_X, EVEN_Y), balance=True, balance_every=8).fit()
    assert 0 <= summary["rank_batch_sizes"][0] <= 1
    assert_equals_one_process(model, even=True)


def test_a_changed_speed_is_followed_within_two_intervals():
    """Within an interval, the slow rank becomes fast and the last one slow."""
    every, changed_at = 8, 28

    class ChangeSpeeds(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if trainer.step == changed_at:
                pause.seconds_per_sample = SLOW if RANK == SIZE - 1 else FAST

    pause = pause_of_first_rank()
    model = make_model(100 + RANK, pause)
    options = {"balance": True, "balance_every": every, "callbacks": [ChangeSpeeds()]}
    trainer = trainer_of(model, Arrays(EVEN_X, EVEN_Y), **options)
    trainer.fit()
    sizes = np.array(COLLECTIVES.allgather(pause.batch_sizes[-STEPS:]))
    before, after = sizes[:, changed_at - 1], sizes[:, changed_at + 2 * every]
    assert before[0] < before[1:].min() / 2
    assert after[-1] < after[:-1].min() / 2
    assert_equals_one_process(model, even=True)


@pytest.mark.parametrize("source", [Arrays, pytest.param(Stream, marks=pytest.mark.long)])
def test_fixed_shares(source):
    model = make_model(100 + RANK)
    shares = [1, *[3] * (SIZE - 1)]
    data = Arrays(X, Y) if source is Arrays else Stream(tf.data.Dataset.from_tensor_slices((X, Y)))
    summary = trainer_of(model, data, shares=",".join(map(str, shares))).fit()
    assert sum(summary["rank_batch_sizes"]) == GLOBAL_BATCH
    assert summary["rank_batch_sizes"] == pytest.approx([GLOBAL_BATCH * each / sum(shares) for each in shares], abs=1)
    assert_equals_one_process(model, shuffle=source is Arrays)


def test_a_rank_without_a_share_waits_for_the_others():
    model = make_model(100 + RANK)
    summary = trainer_of(model, shares=",".join(["0", *["1"] * (SIZE - 1)])).fit()
    assert summary["rank_batch_sizes"][0] == 0
    assert_equals_one_process(model)


def test_metrics_of_unequal_batches_are_exact():
    """One epoch without updates: loss and accuracy are those of all samples."""
    model = make_model(100)
    model.optimizer.learning_rate = 0.0
    steps = -(-len(X) // GLOBAL_BATCH)
    expected = model.evaluate(X, Y, verbose=0, return_dict=True)
    summary = trainer_of(model, steps=steps, shares=",".join(["1", *["3"] * (SIZE - 1)])).fit()
    assert summary["loss"] == pytest.approx(expected["loss"], rel=1e-9)
    assert summary["metrics"]["accuracy"] == pytest.approx(expected["accuracy"], rel=1e-6)


def test_a_resumed_run_begins_with_the_assignment_it_had(folder):
    first = make_model(100 + RANK, pause_of_first_rank())
    options = {"balance": True, "balance_every": 8}
    made = trainer_of(first, steps=24, checkpointer=hvdtrain.Checkpointer(folder, first), **options).fit()
    again = make_model(300 + RANK, pause_of_first_rank())
    # No decision is due before the end: the sizes are those of the checkpoint.
    options["balance_every"] = 500
    summary = trainer_of(again, checkpointer=hvdtrain.Checkpointer(folder, again), **options).fit()
    assert summary["resumed_from"] == 24
    assert summary["rank_batch_sizes"] == made["rank_batch_sizes"] != [16] * SIZE
    assert_equals_one_process(again)


def test_a_stop_keeps_the_assignment(folder, watch):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if trainer.step == 30 and RANK == SIZE - 1:
                watch.request_stop("a test")

    model = make_model(100 + RANK, pause_of_first_rank())
    trainer = trainer_of(
        model,
        checkpointer=hvdtrain.Checkpointer(folder, model),
        job_watch=watch,
        callbacks=[Stop()],
        balance=True,
        balance_every=8,
    )
    with pytest.raises(StoppedEarly):
        trainer.fit()
    model = make_model(300 + RANK, pause_of_first_rank())
    trainer_of(model, checkpointer=hvdtrain.Checkpointer(folder, model), balance=True, balance_every=8).fit()
    assert_equals_one_process(model)
