"""The line about hvdtrain.autotune at the end of model.fit."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest

import hvdtrain
from hvdtrain.optim import short_steps

hvdtrain.init()


@pytest.fixture
def clock(monkeypatch):
    """Advances by ``seconds`` between the two times that it is read in a call of fit."""
    clock = SimpleNamespace(seconds=0.0, now=0.0)

    def perf_counter():
        clock.now += clock.seconds
        return clock.now

    monkeypatch.setattr(short_steps, "time", SimpleNamespace(perf_counter=perf_counter))
    return clock


def fit(*, is_distributed=True, **options):
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD()
    model.compile(hvdtrain.DistributedOptimizer(optimizer) if is_distributed else optimizer, "mse", **options)
    model.fit(np.ones((40, 2), np.float32), np.ones((40, 1), np.float32), batch_size=4, epochs=2, verbose=0)


def test_short_steps_of_a_long_run_are_named(clock, monkeypatch, capfd):
    line = (
        "hvdtrain: model.fit made 20 steps, in 2 ms each. hvdtrain.autotune measures whether they are shorter with "
        "several in one call, model.compile(…, steps_per_execution=…)\n"
    )
    monkeypatch.setattr(short_steps, "_LONG_S", 0.03)
    clock.seconds = 0.04
    fit()
    assert line in capfd.readouterr().err
    for seconds, options in (
        (0.029, {}),
        (0.101, {}),
        (0.04, {"steps_per_execution": 2}),
        (0.04, {"is_distributed": False}),
    ):
        clock.seconds = seconds
        fit(**options)
        assert "model.fit made" not in capfd.readouterr().err
