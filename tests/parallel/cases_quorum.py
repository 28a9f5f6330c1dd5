"""On all ranks: steps that close before the slowest ranks are ready equal those of one process on the same samples."""

import json
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from models import NUM_CLASSES, loss, relative_difference, samples, values
from trainers import make_trainer

import hvdtrain
from hvdtrain.data import Arrays
from hvdtrain.data.sample_plan import SamplePlan
from hvdtrain.distributed import runtime
from hvdtrain.training.config import QuorumConfig
from hvdtrain.training.quorum.ledger import QuorumLedger

TOPOLOGY = hvdtrain.init(seed=0)
RANK, SIZE = TOPOLOGY.rank, TOPOLOGY.size
COLLECTIVES = runtime.current().collectives
BATCH, SEED = 8, 5
X, Y = samples(12 * BATCH * SIZE + 5, seed=1)
EPOCHS = 2


class HoldUp(layers.Layer):
    """Sleeps at some calls of a rank's forward pass, and a little at all."""

    def __init__(self, calls=(), seconds=0.15, always=0.002):
        super().__init__()
        self.calls, self.seconds, self.always = set(calls), seconds, always
        self.count = 0

    def call(self, x, training=False):
        if not training:
            return x

        def pause(rows):
            time.sleep(self.seconds if self.count in self.calls else self.always)
            self.count += 1
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


@pytest.fixture
def double_precision():
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


def trainer_of(model, **options) -> hvdtrain.Trainer:
    source = options.pop("source", None) or Arrays(X, Y)
    options = {"batch_size": BATCH, "epochs": EPOCHS, "seed": SEED, "quorum": max(1, SIZE - 1), **options}
    if "steps" in options:
        del options["epochs"]
    return make_trainer(model, source, log_every=1000, **options)


def recorded(path) -> list[tuple[int, ...]]:
    COLLECTIVES.barrier()
    return [tuple(json.loads(line)) for line in path.read_text().splitlines()[1:]]


def batches_of(contributions) -> list[np.ndarray]:
    """The sample numbers of each update."""
    plan = SamplePlan(num_samples=len(X), batch_size=BATCH, size=SIZE, seed=SEED)
    ledger = QuorumLedger(plan, QuorumConfig(quorum=1))
    batches = []
    for ranks in contributions:
        shares = ledger.shares
        next_ones = [shares.next_of(rank) for rank in ranks]
        positions = [shares.positions_of(rank, each.index) for rank, each in zip(ranks, next_ones, strict=True)]
        batches.append(plan.order(shares.epoch)[np.concatenate(positions)])
        ledger.record(ranks)
    return batches


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
