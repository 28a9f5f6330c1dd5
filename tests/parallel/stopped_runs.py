"""Runs that are stopped and resumed, shared by the cases."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from models import NUM_CLASSES, loss, values
from trainers import make_trainer
from trainings import COLLECTIVES, GLOBAL_BATCH, RANK, SIZE, STEPS, X, Y

import hvdtrain
from hvdtrain.data import Arrays
from hvdtrain.distributed.optimizers import optimizer_variables
from hvdtrain.errors import StoppedEarly
from hvdtrain.fault_tolerance.job_watch import JobWatch


class StopAt(keras.callbacks.Callback):
    """Requests a stop after a number of calls of the step, from the last rank only, as a signal does."""

    def __init__(self, watch: JobWatch, calls: int, *, rank: int = SIZE - 1):
        super().__init__()
        # Not plain values, which a resumed run would restore.
        self._watch, self._last_call, self._calls = watch, calls, itertools.count(1)
        self._is_mine = rank == RANK

    def on_train_batch_end(self, batch, logs=None):
        if next(self._calls) == self._last_call and self._is_mine:
            self._watch.request_stop("a test")


class StopInEvaluation(keras.callbacks.Callback):
    """Requests a stop at the start of an evaluation, from the last rank only."""

    def __init__(self, watch: JobWatch, evaluation: int):
        super().__init__()
        self._watch, self._evaluation, self._evaluations = watch, evaluation, itertools.count(1)

    def on_test_begin(self, logs=None):
        if next(self._evaluations) == self._evaluation and RANK == SIZE - 1:
            self._watch.request_stop("a test")


def noisy_model() -> keras.Model:
    """A model with statistics, and with random streams."""
    return keras.Sequential(
        [
            layers.Input((6,)),
            layers.Dense(16, activation="tanh"),
            layers.BatchNormalization(momentum=0.9),
            layers.Dropout(0.3),
            layers.GaussianNoise(0.1),
            layers.Dense(NUM_CLASSES),
        ]
    )


class TwoOptimizers(keras.Sequential):
    """The first layer has an optimizer of its own."""

    def __init__(self):
        super().__init__([layers.Input((6,)), layers.Dense(16, activation="tanh"), layers.Dense(NUM_CLASSES)])
        self.first_optimizer = keras.optimizers.RMSprop(0.01, momentum=0.9)

    def train_step(self, data):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x, y, y_pred, sample_weight)
            self._loss_tracker.update_state(loss, sample_weight=keras.ops.shape(y)[0])
            scaled = self.optimizer.scale_loss(loss)
        variables = self.trainable_weights
        gradients = tape.gradient(scaled, variables)
        self.first_optimizer.apply(gradients[:2], variables[:2])
        self.optimizer.apply(gradients[2:], variables[2:])
        return self.compute_metrics(x, y, y_pred, sample_weight)


def augment(x, y, seed):
    return x + tf.random.stateless_normal(tf.shape(x), seed, stddev=0.1), y


def make_run(
    optimizer,
    folder=None,
    *,
    make_model=noisy_model,
    weights=100,
    source=None,
    batch=GLOBAL_BATCH // SIZE,
    keep=3,
    identity=None,
    **options,
) -> hvdtrain.Trainer:
    """A trainer of a new model; its checkpoints are in the folder, if there is one.

    Args:
        optimizer: makes one.
        weights: the seed of the initial weights.
        batch: samples of this rank in a step.
        identity: see hvdtrain.Checkpointer.
    """
    # Different initial weights at each start and on each rank: all of them must be replaced.
    keras.utils.set_random_seed(weights)
    model = make_model()
    model.compile(optimizer=optimizer(), loss=loss(), metrics=["accuracy"])
    checkpointer = None if folder is None else hvdtrain.Checkpointer(folder, model, keep=keep, identity=identity)
    arguments = {"steps": STEPS, "seed": 5, "log_every": 5, **options}
    arguments["batch_size"] = batch // arguments.get("gradient_accumulation_steps", 1)
    source = source or Arrays(X, Y, augment=augment)
    return make_trainer(model, source, Arrays(X[:99], Y[:99]), checkpointer=checkpointer, **arguments)


def results_of(trainer, summary) -> tuple:
    """What a run has computed: weights, optimizer, random streams and summary."""
    everything = [values(trainer.model.weights), values(optimizer_variables(trainer.model))]
    own = [v.numpy() for v in trainer.model.variables]  # random streams included
    return everything, own, {name: summary[name] for name in ("loss", "metrics", "eval", "samples", "weights_sha256")}


def assert_same_results(one, other) -> None:
    for these, those in zip([*one[0], one[1]], [*other[0], other[1]], strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(these, those, strict=True))
    assert one[2] == other[2]


def stopped(trainer) -> int:
    """Trains until all ranks stop together; returns the step."""
    with pytest.raises(StoppedEarly, match="The state is saved") as caught:
        trainer.fit()
    assert caught.value.exit_code == 75
    assert len(set(COLLECTIVES.allgather(trainer.step))) == 1
    return trainer.step
