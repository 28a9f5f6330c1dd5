"""Metrics whose state is not a sum over samples are refused, also if it starts at 0."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from trainers import make_trainer

import hvdtrain
from hvdtrain.callbacks import MetricAverageCallback
from hvdtrain.data import Arrays
from hvdtrain.errors import UsageError

hvdtrain.init()
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(40, 5)).astype(np.float32), RNG.normal(size=(40, 1)).astype(np.float32)


class Own(keras.metrics.Metric):
    """A metric of a user's own, with one variable."""

    def __init__(self, **options):
        super().__init__(name="own")
        self.state = self.add_weight(initializer="zeros", name="state", **options)

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.state.assign(self.updated(self.state, ops.reshape(y_pred, (-1,))))

    def result(self):
        return self.state


class Largest(Own):
    def updated(self, state, values):
        return ops.maximum(state, ops.max(values))


class Smallest(Own):
    def updated(self, state, values):
        return ops.minimum(state, ops.min(values))


class Last(Own):
    def updated(self, state, values):
        return values[-1]


class MovingAverage(Own):
    def updated(self, state, values):
        return 0.9 * state + 0.1 * ops.mean(values)


class Flag(Own):
    def __init__(self):
        super().__init__(dtype="bool")

    def updated(self, state, values):
        return state | ops.any(values > 0)


class SumOfSquares(Own):
    def updated(self, state, values):
        return state + 1e4 * ops.sum(values**2)


class Count(Own):
    def __init__(self):
        super().__init__(dtype="int32")

    def updated(self, state, values):
        return state + ops.shape(values)[0]


class OwnMean(keras.metrics.Mean):
    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(ops.abs(y_true - y_pred), sample_weight)


def fit(metric, *, trainer: bool, eager: bool = False, fits: int = 1) -> None:
    keras.utils.set_random_seed(3)
    model = keras.Sequential([layers.Input((5,)), layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse", metrics=[metric], run_eagerly=eager)
    if trainer:
        make_trainer(model, Arrays(X, Y), Arrays(X, Y), batch_size=8, epochs=1).fit()
        return
    for i in range(fits):
        callbacks = [MetricAverageCallback()] if i == fits - 1 else []
        model.fit(X, Y, batch_size=8, verbose=0, validation_data=(X, Y), callbacks=callbacks)


@pytest.mark.parametrize("trainer", [True, False])
@pytest.mark.parametrize("metric", [Largest, Smallest, Last, MovingAverage, Flag])
def test_what_is_not_a_sum_is_refused(metric, trainer):
    with pytest.raises(UsageError, match=r"must consist of sums.*metric '(own|compile_metrics)'"):
        fit(metric(), trainer=trainer)


@pytest.mark.parametrize("options", [{"eager": True}, {"fits": 2}])
def test_also_in_eager_steps_and_after_a_fit_without_the_check(options):
    with pytest.raises(UsageError, match="whose update depends on the state"):
        fit(Largest(), trainer=False, **options)


@pytest.mark.parametrize("trainer", [True, False])
@pytest.mark.parametrize("metric", [SumOfSquares, Count, OwnMean])
def test_sums_of_the_users_own_are_not(metric, trainer):
    fit(metric(), trainer=trainer)


def test_a_sum_that_starts_at_one_is_refused():
    class FromOne(Own):
        def __init__(self):
            keras.metrics.Metric.__init__(self, name="own")
            self.state = self.add_weight(initializer="ones", name="state")

        def updated(self, state, values):
            return state + ops.sum(values)

        def reset_state(self):
            self.state.assign(1.0)

    with pytest.raises(UsageError, match="starts at another value"):
        fit(FromOne(), trainer=True)
