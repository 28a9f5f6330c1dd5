"""On all ranks: steps that close before the slowest ranks are ready equal those of one process on the same samples."""

import json
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from contributions import samples_of_updates
from keras import layers
from models import NUM_CLASSES, SHARED_GPUS, loss, relative_difference, samples, values
from noted_findings import noted_findings
from tensorflow.python.framework import config
from trainers import make_trainer
from trainings import dtype_policy

import hvdtrain
from hvdtrain.data import Arrays
from hvdtrain.data.sample_plan import SamplePlan
from hvdtrain.distributed import runtime
from hvdtrain.distributed.optimizers import leaves_of
from hvdtrain.errors import NonFiniteError, StoppedEarly, UnequalError, UsageError
from hvdtrain.optim.kept_batch import KeptBatch
from hvdtrain.training.config import QuorumConfig
from hvdtrain.training.quorum.ledger import QuorumLedger

TOPOLOGY = hvdtrain.init(seed=0, gpus=SHARED_GPUS)
RANK, SIZE = TOPOLOGY.rank, TOPOLOGY.size
COLLECTIVES = runtime.current().collectives
BATCH, SEED = 8, 5
X, Y = samples(12 * BATCH * SIZE + 5, seed=1)
EPOCHS = 2


class HoldUp(layers.Layer):
    """Sleeps a little in a rank's forward pass, and at some calls until the update has closed without this rank.

    Args:
        at_most_s: how long at those calls; the other ranks may have to wait for this one.
    """

    def __init__(self, calls=(), always=0.01, at_most_s=2.0):
        super().__init__()
        self.calls, self.always, self.at_most_s = set(calls), always, at_most_s
        self.count = 0
        self.has_closed = lambda: False

    def wait(self):
        time.sleep(self.always)
        if self.count in self.calls:
            self.hold_up()
        self.count += 1

    def hold_up(self):
        # A fixed time would be too short on a busy machine.
        until_s = time.monotonic() + self.at_most_s
        while not self.has_closed() and time.monotonic() < until_s:
            time.sleep(0.005)
        time.sleep(0.1)

    def call(self, x, training=False):
        if not training:
            return x

        def pause(rows):
            self.wait()
            return rows

        @tf.custom_gradient
        def slow(x):
            y = tf.numpy_function(pause, [x], x.dtype)
            y.set_shape(x.shape)
            return y, lambda upstream: upstream

        return slow(x)


def occasional_hold_ups() -> HoldUp:
    """The last rank is held up three times in its first epoch, the first one once."""
    return HoldUp({3, 4, 9} if RANK == SIZE - 1 else {6} if RANK == 0 else ())


def make_model(seed: int, *more: layers.Layer, optimizer=None) -> keras.Model:
    keras.utils.set_random_seed(seed)
    hidden = layers.Dense(16, activation="tanh")
    model = keras.Sequential([layers.Input((6,)), *more, hidden, layers.Dense(NUM_CLASSES)])
    model.compile(optimizer or keras.optimizers.Adam(0.01, global_clipnorm=0.5), loss(), metrics=["accuracy"])
    return model


class Centred(layers.Layer):
    def call(self, x):
        return x - keras.ops.mean(x, 0)


def test_the_program_is_checked(monkeypatch):
    """Also if a rank has no batch in the first steps: the check waits until all have one."""
    findings, take, taken = noted_findings(monkeypatch), KeptBatch.take, []

    def take_late(batches):
        taken.append(take(batches))
        return None if RANK == 0 and len(taken) == 1 else taken[-1]

    monkeypatch.setattr(KeptBatch, "take", take_late)
    trainer_of(make_model(1, layers.BatchNormalization()), epochs=1).fit()
    assert len(taken) == len(findings) + 1
    assert {(each.unequal, each.unchecked) for each in findings} == {(None, None)}
    assert findings[0].compared["gradient"] >= 4
    with pytest.raises(UnequalError, match="depends on the other samples of the batch"):
        trainer_of(make_model(1, Centred()), epochs=1).fit()


@pytest.fixture
def double_precision():
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


@pytest.fixture
def not_deterministic():
    """XLA excludes it, and the fixtures enable it."""
    config.disable_op_determinism()
    yield
    config.enable_op_determinism()


def trainer_of(model, **options) -> hvdtrain.Trainer:
    source = options.pop("source", None) or Arrays(X, Y)
    # A long grace: on a busy machine a rank may be late by more than a tenth of these short steps.
    common = {"batch_size": BATCH, "epochs": EPOCHS, "seed": SEED, "quorum": max(1, SIZE - 1), "step_grace": 3.0}
    options = {**common, **options}
    if options["quorum"] is None:
        del options["step_grace"]
    if "steps" in options:
        del options["epochs"]
    trainer = make_trainer(model, source, log_every=1000, **options)
    for layer in model.layers:
        if isinstance(layer, HoldUp):
            layer.has_closed = lambda: trainer.parts.strategy.has_closed
    return trainer


def recorded(path) -> list[tuple[int, ...]]:
    COLLECTIVES.barrier()
    return [tuple(json.loads(line)) for line in path.read_text().splitlines()[1:]]


def batches_of(contributions) -> list[np.ndarray]:
    return samples_of_updates(contributions, SamplePlan(num_samples=len(X), batch_size=BATCH, size=SIZE, seed=SEED))


def alone(contributions, **options) -> keras.Model:
    """One process with the same samples in each update."""
    model = make_model(100, **options)
    for batch in batches_of(contributions):
        model.train_on_batch(X[batch], Y[batch])
    return model


def assert_equal_replicas(model) -> None:
    ours = values(model.weights)
    for theirs in COLLECTIVES.allgather(ours):
        assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_updates_are_those_of_one_process_with_the_same_samples(double_precision, folder):
    path = folder / "contributions.jsonl"
    model = make_model(100 + RANK, occasional_hold_ups())
    summary = trainer_of(model, record=str(path)).fit()
    contributions = recorded(path)
    assert_equal_replicas(model)
    assert relative_difference(values(model.weights), values(alone(contributions).weights)) < 1e-10
    # Each sample once an epoch.
    drawn = np.concatenate(batches_of(contributions))
    for epoch in range(EPOCHS):
        assert sorted(drawn[epoch * len(X) : (epoch + 1) * len(X)]) == list(range(len(X)))
    assert summary["samples"] == EPOCHS * len(X)
    assert summary["steps"] == EPOCHS * 13
    assert summary["updates"] == len(contributions) > summary["steps"]
    assert summary["dropped_micro_batches"][-1] >= 1
    assert summary["requeued_samples"][-1] >= BATCH
    assert summary["effective_batch"]["max"] == BATCH * SIZE
    assert summary["effective_batch"]["mean"] == pytest.approx(EPOCHS * len(X) / len(contributions))
    assert summary["time_saved_seconds"] > 0.1


def trained(seed: int, *more: layers.Layer, optimizer=None, **options) -> tuple[keras.Model, dict]:
    model = make_model(seed + RANK, *more, optimizer=optimizer)
    return model, trainer_of(model, **options).fit()


def noisy_layers() -> list[layers.Layer]:
    """Layers whose state changes in each forward pass."""
    return [layers.BatchNormalization(), layers.Dropout(0.3, seed=3)]


@pytest.mark.parametrize("more", [[], pytest.param(noisy_layers, marks=pytest.mark.long)], ids=["plain", "noisy"])
def test_without_stragglers_it_is_sync_training(more, double_precision):
    """Waiting for all ranks, so that a busy machine makes no straggler."""
    make = list if more == [] else more
    quorum, summary = trained(100, *make(), quorum=SIZE)
    sync, expected = trained(100, *make(), quorum=None)
    # The weights of an incomplete last step are rounded differently.
    assert relative_difference(values(quorum.weights), values(sync.weights)) < 1e-12
    assert summary["updates"] == summary["steps"] == expected["steps"]
    assert summary["dropped_micro_batches"] == summary["missed_updates"] == [0] * SIZE
    assert summary["loss"] == pytest.approx(expected["loss"], rel=1e-9)
    assert summary["metrics"] == pytest.approx(expected["metrics"], rel=1e-9)


def make_optimizer(name: str) -> keras.optimizers.Optimizer:
    if name == "schedule and EMA":
        rate = keras.optimizers.schedules.PiecewiseConstantDecay([5, 15], [0.02, 0.01, 0.001])
        return keras.optimizers.SGD(rate, momentum=0.9, use_ema=True, ema_momentum=0.9)
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05, clipnorm=0.2), initial_scale=2.0**127)


def test_ema_follows_the_updates_and_a_schedule_the_steps(double_precision, folder):
    path = folder / "contributions.jsonl"
    model, _ = trained(100, occasional_hold_ups(), optimizer=make_optimizer("schedule and EMA"), record=str(path))
    plan = SamplePlan(num_samples=len(X), batch_size=BATCH, size=SIZE, seed=SEED)
    ledger = QuorumLedger(plan, QuorumConfig(quorum=1))
    expected = make_model(100, optimizer=keras.optimizers.SGD(0.02, momentum=0.9, use_ema=True, ema_momentum=0.9))
    contributions = recorded(path)
    schedule = make_optimizer("schedule and EMA")._learning_rate
    for ranks, batch in zip(contributions, batches_of(contributions), strict=True):
        expected.optimizer.learning_rate = schedule(ledger.step)
        expected.train_on_batch(X[batch], Y[batch])
        ledger.record(ranks)
    expected.optimizer.finalize_variable_values(expected.trainable_variables)
    assert relative_difference(values(model.weights), values(expected.weights)) < 1e-10
    # The schedule follows the updates again.
    assert float(model.optimizer.learning_rate) == float(schedule(len(contributions)))


@pytest.mark.long
def test_embeddings_are_reduced_as_dense_gradients_and_the_optimizer_reduces_again_afterwards():
    """Each rank uses other rows."""
    x = np.random.default_rng(0).integers(0, 50, (len(X), 4))

    def make() -> keras.Model:
        keras.utils.set_random_seed(100 + RANK)
        inner = [layers.Embedding(50, 8), HoldUp(), layers.Flatten(), layers.Dense(NUM_CLASSES)]
        model = keras.Sequential([layers.Input((4,), dtype="int32"), *inner])
        model.compile(keras.optimizers.Adam(0.01), loss())
        return model

    model, sync = make(), make()
    options = {"source": Arrays(x.astype(np.int32), Y), "epochs": 1}
    trainer_of(model, quorum=SIZE, **options).fit()
    trainer_of(sync, quorum=None, **options).fit()
    assert relative_difference(values(model.weights), values(sync.weights)) < 1e-4
    model.train_on_batch((x[:8] + RANK) % 50, Y[:8])
    assert_equal_replicas(model)


@pytest.mark.long
@pytest.mark.usefixtures("not_deterministic")
@pytest.mark.parametrize("jit_compile", [False, True], ids=["", "jit_compile"])
@pytest.mark.parametrize(
    ("policy", "tolerance"), [("float64", 1e-10), ("mixed_bfloat16", 0.02), ("mixed_float16", 0.005)]
)
def test_xla_and_mixed_precision(policy, tolerance, jit_compile, folder, monkeypatch):
    """Ranks are held up while they read, because XLA compiles no layer that sleeps."""
    path = folder / "contributions.jsonl"
    make_sgd = lambda: keras.optimizers.SGD(0.05, momentum=0.9, clipnorm=0.5)
    with dtype_policy(policy):
        keras.config.set_floatx("float64" if policy == "float64" else "float32")
        try:
            model = make_model(100 + RANK, optimizer=make_sgd())
            trainer = trainer_of(model, record=str(path), jit_compile=jit_compile)
            reading, feed = occasional_hold_ups(), trainer.parts.feed
            reading.has_closed = lambda: trainer.parts.strategy.has_closed
            read = feed.batch

            def read_late(shares, micro_batch):
                reading.wait()
                return read(shares, micro_batch)

            monkeypatch.setattr(feed, "batch", read_late)
            summary = trainer.fit()
            expected = alone(recorded(path), optimizer=make_sgd())
        finally:
            keras.config.set_floatx("float32")
    assert_equal_replicas(model)
    assert relative_difference(values(model.weights), values(expected.weights)) < tolerance
    assert summary["samples"] == EPOCHS * len(X)
    assert summary["dropped_micro_batches"][-1] >= 1


@pytest.mark.long
def test_loss_scaling_skips_an_overflow_on_all_ranks():
    model = make_model(100 + RANK, occasional_hold_ups(), optimizer=make_optimizer("loss scale"))
    # The first scales are too large for losses of this size.
    data = Arrays(X, Y, np.full(len(X), 64.0, np.float32))
    summary = trainer_of(model, source=data, on_nan="ignore").fit()
    assert_equal_replicas(model)
    scale = float(model.optimizer.dynamic_scale.numpy())
    assert summary["skipped_steps"] == 127 - np.log2(scale) >= 1
    assert summary["updates"] - summary["skipped_steps"] == int(leaves_of(model)[0].iterations.numpy()) > 10
    assert all(np.isfinite(each).all() for each in values(model.weights))


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, SIZE - 1])
def test_a_non_finite_micro_batch_is_skipped_on_all_ranks_or_stops_them(rank, folder):
    path = folder / "contributions.jsonl"
    x = np.array(X)
    plan = SamplePlan(num_samples=len(X), batch_size=BATCH, rank=rank, size=SIZE, seed=SEED)
    x[plan.numbers(4)[0]] = np.nan
    data = Arrays(x, Y)
    model = make_model(100 + RANK, occasional_hold_ups(), layers.BatchNormalization())
    summary = trainer_of(model, source=data, record=str(path), on_nan="skip").fit()
    bad = int(np.flatnonzero(np.isnan(x).any(axis=1))[0])
    assert summary["skipped_steps"] == sum(bad in batch for batch in batches_of(recorded(path))) == EPOCHS
    assert all(np.isfinite(each).all() for each in values(model.variables))
    assert_equal_replicas(model)
    with pytest.raises(NonFiniteError, match=rf"At step \d+: the loss on rank {rank} is not finite") as error:
        trainer_of(make_model(100 + RANK, HoldUp()), source=data).fit()
    assert len(set(COLLECTIVES.allgather(str(error.value)))) == 1


def test_metrics_are_those_of_each_sample_once():
    model = make_model(100, occasional_hold_ups())
    model.optimizer.learning_rate = 0.0
    expected = model.evaluate(X, Y, verbose=0, return_dict=True)
    summary = trainer_of(model, epochs=1).fit()
    assert summary["updates"] > summary["steps"]
    assert summary["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert summary["metrics"]["accuracy"] == pytest.approx(expected["accuracy"], rel=1e-6)


class StopAt(keras.callbacks.Callback):
    """Requests a stop on the last rank after a step."""

    def __init__(self, step, watch, trainer):
        super().__init__()
        self.step, self.watch, self.trainer = step, watch, trainer

    def on_train_batch_end(self, batch, logs=None):
        if self.trainer().step == self.step and RANK == SIZE - 1:
            self.watch.request_stop("a test")


def test_a_replay_is_bit_identical_also_if_it_is_stopped_and_resumed(folder, watch):
    path = str(folder / "contributions.jsonl")
    _, first = trained(100, occasional_hold_ups(), *noisy_layers(), record=path)
    assert first["updates"] > first["steps"]
    # Other ranks are held up now.
    _, again = trained(100, HoldUp({2} if RANK == 0 else (), at_most_s=0.2), *noisy_layers(), replay=path)
    assert again["weights_sha256"] == first["weights_sha256"]
    assert again["loss"] == first["loss"]
    assert (again["updates"], again["missed_updates"]) == (first["updates"], first["missed_updates"])
    model = make_model(100 + RANK, HoldUp(), *noisy_layers())
    checkpointer = hvdtrain.Checkpointer(folder / "stopped", model)
    trainers: list[hvdtrain.Trainer] = []
    options = {"replay": path, "record": str(folder / "again.jsonl"), "job_watch": watch}
    stop = StopAt(9, watch, lambda: trainers[0])
    trainers.append(trainer_of(model, checkpointer=checkpointer, callbacks=[stop], **options))
    with pytest.raises(StoppedEarly, match="stopped at step 9"):
        trainers[0].fit()
    del options["job_watch"]
    model = make_model(300 + RANK, HoldUp(), *noisy_layers())
    summary = trainer_of(model, checkpointer=hvdtrain.Checkpointer(folder / "stopped", model), **options).fit()
    assert summary["resumed_from"] == 9
    assert summary["weights_sha256"] == first["weights_sha256"]
    assert summary["loss"] == first["loss"]
    for name in ("samples", "updates", "effective_batch", "missed_updates"):
        assert summary[name] == first[name]
    assert recorded(folder / "again.jsonl") == recorded(folder / "contributions.jsonl")


class Warnings(hvdtrain.Reporter):
    def __init__(self):
        self.texts = []

    def warned(self, step, text):
        self.texts.append(text)


def test_a_rank_that_is_never_ready_is_waited_for_and_named(folder):
    path, reporter = folder / "contributions.jsonl", Warnings()
    slow = HoldUp(always=0.1 if RANK == SIZE - 1 else 0.01)
    model = make_model(100 + RANK, slow)
    options = {"max_missed_updates": 3, "step_grace": 0.5, "record": str(path), "guard_every": 1, "reporter": reporter}
    summary = trainer_of(model, **options).fit()
    contributed = np.array([SIZE - 1 in ranks for ranks in recorded(path)])
    gaps = np.diff(np.flatnonzero(np.concatenate([[True], contributed, [True]])))
    assert gaps.max() <= 4
    # Updates for which it had no samples left are not missed.
    assert summary["updates"] / 3 < summary["missed_updates"][-1] <= (~contributed).sum()
    assert [text for text in reporter.texts if f"rank {SIZE - 1} (host " in text and "missed 3 updates" in text]
    assert_equal_replicas(model)


def test_a_deadline_closes_a_step_without_a_quorum():
    slow = HoldUp(always=0.2 if RANK > 0 else 0.01)
    model, summary = trained(100, slow, quorum=SIZE, step_deadline=0.03, steps=10)
    assert summary["updates"] > 10
    assert summary["effective_batch"]["min"] < BATCH * SIZE
    assert min(summary["missed_updates"][1:]) > summary["missed_updates"][0]
    assert_equal_replicas(model)


def test_a_loss_that_counts_its_positions_is_refused():
    model = make_model(100)
    model.compile(keras.optimizers.Adam(), keras.losses.SparseCategoricalCrossentropy(True, ignore_class=0))
    with pytest.raises(Exception, match="quorum excludes a loss that divides by the number of unmasked positions"):
        trainer_of(model).fit()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"quorum": SIZE + 1}, "at most the number of ranks"), ({"sync_batchnorm": True}, "excludes sync_batchnorm=True")],
)
def test_what_cannot_work_is_refused(options, message):
    with pytest.raises(UsageError, match=message):
        trainer_of(make_model(100, layers.BatchNormalization()), **options)


def test_an_optimizer_that_does_not_average_is_refused():
    optimizer = hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.1), compression="fp16")
    with pytest.raises(Exception, match="quorum excludes compression"):
        trainer_of(make_model(100, optimizer=optimizer)).fit()
