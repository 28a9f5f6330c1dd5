"""On all ranks: batches of different sizes count by their samples, also in the check of a step."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from compared_programs import (
    BATCH,
    FEATURES,
    RANK,
    SIZE,
    TARGETS,
    UNEQUAL,
    Centred,
    Noise,
    Spread,
    X,
    Y,
    mean_square,
    network,
)
from keras import layers
from models import relative_difference, values
from noted_findings import noted_findings

import hvdtrain
from hvdtrain.errors import UnequalError
from hvdtrain.optim import keras_calls
from hvdtrain.training.equality import step_check
from hvdtrain.training.equality.draws import Draws


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


class Masked(keras.losses.Loss):
    def call(self, y_true, y_pred):
        values = (y_true - y_pred)[:, 0] ** 2
        values._keras_mask = y_true[:, 0] > 0
        return values


class MeanStep(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            p = self(x, training=True)
            loss = tf.reduce_mean(mean_square(y, p)) + tf.reduce_mean(hvdtrain.gather(p)) ** 2
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"none": 0.0}


EQUAL_WITH_DIFFERENT_SIZES = {
    "draws": lambda: (network(layers.BatchNormalization(synchronized=True), layers.Dropout(0.5), Noise()), mean_square),
    "masked": lambda: (network(), Masked()),
    "whole batch": lambda: (network(layers.BatchNormalization(synchronized=True)), hvdtrain.WholeBatch(Spread())),
    "own step": lambda: (network(layers.BatchNormalization(synchronized=True), kind=MeanStep), None),
}


@pytest.mark.parametrize("program", EQUAL_WITH_DIFFERENT_SIZES)
def test_batches_of_different_sizes(program, monkeypatch):
    found = noted_findings(monkeypatch)
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
def test_where_a_step_is_not_that_of_one_process_with_different_sizes(place):
    with pytest.raises(UnequalError) as caught:
        UNEQUAL[place](fit_with_different_sizes)
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


def test_the_trainer_weighs_an_uneven_step(monkeypatch):
    """The only step of an epoch, with one sample more on rank 0 than on the others."""
    found = noted_findings(monkeypatch)
    of_rank = SIZE * max(2, 6 // SIZE)  # the check takes a SIZE-th of it: one row more on rank 0
    samples = SIZE * (of_rank - 1) + 1

    def train(*more):
        model = network(*more)
        model.compile(keras.optimizers.SGD(0.1), mean_square)
        config = hvdtrain.TrainConfig(batch_size=BATCH, steps=1)
        hvdtrain.Trainer(model, (FEATURES[:samples], TARGETS[:samples]), config, reporter=None).fit()

    rows = []
    monkeypatch.setattr(step_check, "Draws", lambda given, seed: rows.append(given) or Draws(given, seed))
    train(layers.Dropout(0.5), layers.BatchNormalization(synchronized=True))
    assert (found[-1].unequal, found[-1].unchecked) == (None, None)
    assert len(set(rows[0].sizes)) == 2
    with pytest.raises(UnequalError, match=r"depends on the other samples"):
        train(Centred())
    monkeypatch.setattr(keras_calls, "batch_weight", lambda data, pipelines, **options: None)
    with pytest.raises(UnequalError, match=r"batches of different sizes must be weighted"):
        train()
