"""On all ranks: displacements of local SGD that are sent with few bits."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from models import NUM_CLASSES, loss, values
from stopped_runs import StopAt, assert_same_results, make_run, results_of, stopped
from trainings import COLLECTIVES, RANK, SIZE, equal_on_all_ranks, trained

import hvdtrain
from hvdtrain import LocalSGDConfig, ParameterAverager
from hvdtrain.distributed.quantized_sum import QuantizedSum

QUANTA = {8: 127, 4: 7}


@pytest.mark.parametrize("bits", QUANTA)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_a_quantized_sum_leaves_out_is_known(bits, dtype):
    own = [np.random.default_rng((n, RANK)).normal(size=n).astype(dtype) for n in (1, 700, 5000)]
    found = QuantizedSum(COLLECTIVES, bits).sum([tf.constant(each) for each in own], "test_quantized")
    assert equal_on_all_ranks([each.numpy() for each in found.totals])
    everyone, lost = COLLECTIVES.allgather(own), COLLECTIVES.allgather([each.numpy() for each in found.lost])
    for i, total in enumerate(found.totals):
        exact = np.sum([each[i] for each in everyone], axis=0)
        assert total.dtype == dtype
        assert total.numpy() + np.sum([each[i] for each in lost], axis=0) == pytest.approx(exact, abs=1e-5)
        # Each vector is rounded by half of a quantum, and so is their sum.
        assert np.max(np.abs(total - exact)) <= (SIZE + SIZE) * np.max(np.abs(everyone[0][i])) / QUANTA[bits]


def test_a_value_that_is_not_finite_reaches_all_ranks():
    for bad in (np.nan, np.inf):
        own = np.ones(1000, np.float32)
        if RANK == SIZE - 1:
            own[900] = bad
        (total,), _ = QuantizedSum(COLLECTIVES, 4).sum([tf.constant(own)], "test_not_finite")
        assert not np.isfinite(total.numpy()[900])
        assert np.isfinite(total.numpy()[:256]).all()


def wide_model() -> keras.Model:
    model = keras.Sequential([layers.Input((6,)), layers.Dense(300, "tanh"), layers.BatchNormalization()])
    model.add(layers.Dense(NUM_CLASSES))
    return model


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("sync_dtype", ["int8", "int4"])
def test_errors_do_not_add_up(sync_dtype, overlap):
    """After many rounds the average differs from that in full by the errors of the last one, not by those of all."""
    rounds, models = 40, []
    for dtype in ("float32", sync_dtype):
        keras.utils.set_random_seed(3)
        model = wide_model()
        model.compile(keras.optimizers.SGD(0.1), loss())
        hvdtrain.broadcast(model)
        config = LocalSGDConfig(sync_every=1, sync_dtype=dtype, overlap=overlap)
        averager = ParameterAverager(model, config, deterministic=True)
        start = values(model.trainable_weights)
        for step in range(rounds):
            for i, variable in enumerate(model.weights):
                # The same direction in each round: what is always rounded away would be missing in the end.
                moved = np.random.default_rng((i, RANK)).normal(size=variable.shape)
                variable.assign_add((moved * (1 + 0.1 * (step % 3))).astype(np.float32))
            averager.step(samples=8 + RANK)
        averager.finish()
        assert equal_on_all_ranks(values(model.weights))
        models.append((model, averager.bytes_reduced))
    (exact, full), (found, few) = models
    quantum = 4 * 1.2 / QUANTA[8 if sync_dtype == "int8" else 4]
    for ours, theirs, before in zip(found.trainable_weights, exact.trainable_weights, start, strict=True):
        assert np.max(np.abs(theirs.numpy() - before)) > rounds / 4
        assert np.max(np.abs(ours.numpy() - theirs.numpy())) < 3 * quantum
    statistics = [
        np.array_equal(a, b) for a, b in zip(found.non_trainable_weights, exact.non_trainable_weights, strict=True)
    ]
    assert all(statistics)
    assert full / few > (2.5 if sync_dtype == "int8" else 3.5)  # a quarter and an eighth, and the statistics in full


@pytest.mark.parametrize(
    "options",
    [
        {"sync_dtype": "int4", "outer": "nesterov"},
        pytest.param({"sync_dtype": "int8", "overlap": True}, marks=pytest.mark.long),
    ],
)
def test_stopped_and_resumed_equals_uninterrupted(options, folder, watch):
    adam = lambda: keras.optimizers.Adam(0.01)
    options = {"mode": "local", "sync_every": 3, "make_model": wide_model, **options}
    uninterrupted = make_run(adam, **options)
    end = results_of(uninterrupted, uninterrupted.fit())
    stopped(make_run(adam, folder, callbacks=[StopAt(watch, 11)], job_watch=watch, **options))
    resumed = make_run(adam, folder, weights=300 + RANK, **options)
    assert_same_results(results_of(resumed, resumed.fit()), end)


def test_few_bits_train_as_well():
    losses = [
        trained(wide_model, keras.optimizers.SGD(0.05), mode="local", sync_every=4, sync_dtype=dtype)[1]["loss"]
        for dtype in ("float32", "int4")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
