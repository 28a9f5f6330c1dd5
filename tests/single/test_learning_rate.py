"""The learning rate at each step, against values computed by hand."""

import math

import keras
import numpy as np
import pytest

from hvdtrain.optim.learning_rate import WarmUpThenDecay, hold_weights, scaled_learning_rate


def rates(steps, *, micro_batches=1, **options) -> list[float]:
    base = {"warmup_steps": 0, "decay": "none", "decay_rate": 0.1, "decay_steps": 10, "total_steps": 30}
    schedule = WarmUpThenDecay(2.0, **{**base, **options}, micro_batches_per_step=micro_batches)
    return [float(schedule(step)) for step in steps]


def test_warm_up_rises_to_the_peak_and_stays():
    assert rates([0, 1, 3, 4, 29], warmup_steps=4) == pytest.approx([0.5, 1.0, 2.0, 2.0, 2.0])


def test_exponential_is_a_staircase():
    assert rates([0, 9, 10, 19, 20], decay="exponential") == pytest.approx([2.0, 2.0, 0.2, 0.2, 0.02])


def test_cosine_ends_at_zero():
    expected = [2.0, 1 + math.cos(math.pi / 4), 1.0, 0.0]
    assert rates([10, 15, 20, 30], decay="cosine", warmup_steps=10) == pytest.approx(expected, abs=1e-6)


def test_keras_counts_micro_batches():
    assert rates([0, 1, 2, 3, 4], warmup_steps=2, micro_batches=2) == pytest.approx([1.0, 1.0, 2.0, 2.0, 2.0])


def test_scaling_to_the_number_of_ranks():
    assert [scaled_learning_rate(0.1, kind, 4) for kind in ("linear", "sqrt", "none")] == pytest.approx([0.4, 0.2, 0.1])


def test_the_schedule_can_be_saved_and_loaded():
    options = {"warmup_steps": 3, "decay": "cosine", "decay_rate": 0.1, "decay_steps": 1, "total_steps": 9}
    schedule = WarmUpThenDecay(1.0, **options, micro_batches_per_step=1)
    copy = WarmUpThenDecay.from_config(schedule.get_config())
    assert [float(copy(step)) for step in range(9)] == [float(schedule(step)) for step in range(9)]


@pytest.mark.parametrize(
    "rate",
    [1e3, keras.optimizers.schedules.ExponentialDecay(1e3, 10, 0.5), lambda: 1e3],
    ids=["number", "schedule", "callable"],
)
@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "Ftrl"])
def test_held_weights_stay_finite_at_any_learning_rate(rate, optimizer):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    model.compile(getattr(keras.optimizers, optimizer)(rate), "mse", jit_compile=False)
    hold_weights(model)
    before = [np.array(each) for each in model.get_weights()]
    model.fit(np.ones((64, 3), np.float32), np.ones((64, 1), np.float32), batch_size=2, verbose=0)
    for own, was in zip(model.get_weights(), before, strict=True):
        assert np.isfinite(own).all()
        # Ftrl divides by the learning rate and computes the weights anew, with more rounding.
        assert optimizer == "Ftrl" or np.abs(own - was).max() < 1e-6
