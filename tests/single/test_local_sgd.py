"""Unit tests of local SGD; tests/parallel covers several ranks, test_config.py the options."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from trainers import make_trainer

import hvdtrain
from hvdtrain import LocalSGDConfig, ParameterAverager
from hvdtrain.data import Arrays
from hvdtrain.data.sample_plan import SamplePlan
from hvdtrain.errors import UsageError
from hvdtrain.local_sgd import averaged_variables, flat_variables
from hvdtrain.local_sgd.flat_variables import FlatVariables
from hvdtrain.local_sgd.outer_optimizer import NesterovOuter
from hvdtrain.local_sgd.sync_interval import SyncInterval
from hvdtrain.system.background import BackgroundTask

hvdtrain.init()


def adam_model(**options) -> keras.Model:
    model = keras.Sequential(
        [layers.Input((5,)), layers.Dense(4, use_bias=False), layers.BatchNormalization(), layers.Dense(3)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(0.01, **options), loss=loss)
    return model


def test_wait_free_needs_several_ranks():
    with pytest.raises(UsageError, match=r"needs at least 2 ranks\. Received: 1 rank"):
        ParameterAverager(adam_model(), LocalSGDConfig(wait_free=True))


def test_integer_slots_cannot_be_averaged():
    model = adam_model()
    model.optimizer.build(model.trainable_variables)
    model.optimizer.add_variable((), dtype="int32", name="count")
    with pytest.raises(UsageError, match=r"must be floats to be averaged\. Received: .*count.* of dtype int32"):
        ParameterAverager(model, LocalSGDConfig(average_slots="average"))
    ParameterAverager(model, LocalSGDConfig(average_slots="keep"))


def test_learning_rate_and_iterations_are_not_slots():
    model = adam_model()
    model.optimizer.build(model.trainable_variables)
    assert {id(variable) for variable in averaged_variables.slots(model)}.isdisjoint(
        {id(model.optimizer._learning_rate), id(model.optimizer._iterations)}
    )


def test_flat_variables_read_copies_of_all_variables(monkeypatch):
    monkeypatch.setattr(flat_variables, "BUCKET_BYTES", 64)
    rng = np.random.default_rng(0)
    kinds = [((2, 3), "float32"), ((), "float16"), ((4,), "float64"), ((30,), "float32"), ((5,), "bfloat16")]
    variables = [keras.Variable(rng.normal(size=shape), dtype=kind) for shape, kind in kinds]
    flats = FlatVariables(variables)
    # The large float32 variable gets a tensor of its own.
    assert flats.ends == [4]
    before = [variable.numpy() for variable in variables]
    read = flats.read()
    for variable in variables:
        variable.assign(tf.zeros_like(variable.value))
    assert sum(each.shape.num_elements() * each.dtype.size for each in read) == 4 * (6 + 1 + 30 + 5) + 8 * 4
    flats.assign(read)
    assert all(np.array_equal(v.numpy(), each) for v, each in zip(variables, before, strict=True))


def test_adacomm_follows_the_square_root_of_the_loss():
    """H = 10 * sqrt(loss), rounded up, for an initial loss of 1; it never grows."""
    interval = SyncInterval(LocalSGDConfig(sync_every=10, sync_schedule="adacomm"))
    seen = []
    for loss in (1.0, 0.8, 0.26, 0.5, 9.0, 0.01):
        for _ in range(4):  # 160 steps of all ranks
            interval.round_ended(loss * 40, 40)
        seen.append(interval.steps)
    assert seen == [10, 9, 6, 6, 6, 1]
    interval.round_ended(5.0, 40)  # a part of an update
    again = SyncInterval(LocalSGDConfig(sync_every=10, sync_schedule="adacomm"))
    again.restore(interval.state())
    assert again.steps == 1
    assert again.state() == interval.state()


def test_constant_interval():
    interval = SyncInterval(LocalSGDConfig(sync_every=10))
    for _ in range(100):
        interval.round_ended(0.0, 40)
    assert interval.steps == 10


def test_nesterov_accelerates_if_displacements_agree():
    outer = NesterovOuter(learning_rate=1.0, momentum=0.5)
    moves, velocity = outer.move([tf.constant([1.0])], ())
    assert moves[0].numpy() == 1.5
    moves, velocity = outer.move([tf.constant([1.0])], velocity)
    assert moves[0].numpy() == 1.75
    assert velocity[0].numpy() == 1.5


def test_background_error_is_raised_by_result():
    release = threading.Event()

    def fail():
        release.wait(10)
        raise ValueError("failed")

    background = BackgroundTask(fail, "test")
    assert not background.is_done
    release.set()
    with pytest.raises(ValueError, match="failed"):
        background.result()
    assert background.is_done


@pytest.mark.parametrize("remainder", ["pad", "drop"])
def test_own_samples_match_the_plan(remainder):
    plans = [SamplePlan(num_samples=245, batch_size=11, rank=rank, size=3, remainder=remainder) for rank in range(3)]
    epoch = plans[0].steps_per_epoch
    assert sum(plan.own_samples(0, epoch) for plan in plans) == plans[0].samples_per_epoch
    assert sum(plan.own_samples(epoch - 1, epoch + 1) for plan in plans) == sum(
        plan.own_samples(epoch - 1, 1) + plan.own_samples(0, epoch) for plan in plans
    )
    # Fewer samples than ranks in the last step: fillers do not count.
    few = [SamplePlan(num_samples=34, batch_size=11, rank=rank, size=3) for rank in range(3)]
    assert sorted(plan.own_samples(1, 1) for plan in few) == [0, 0, 1]


def test_single_rank_equals_plain_training():
    rng = np.random.default_rng(0)
    data = Arrays(rng.normal(size=(70, 5)).astype(np.float32), rng.integers(0, 3, 70).astype(np.int32))
    weights = []
    for options in ({}, {"mode": "local", "sync_every": 3}):
        keras.utils.set_random_seed(3)
        model = adam_model()
        summary = make_trainer(model, data, data, batch_size=16, epochs=3, **options).fit()
        weights.append([each.numpy() for each in model.weights])
        assert summary["averaging_rounds"] == (5 if options else 0)
    for one, other in zip(*weights, strict=True):
        assert other == pytest.approx(one, abs=1e-5)
