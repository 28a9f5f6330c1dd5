"""The parts of local training by themselves, and its rules; what ranks do together is in tests/parallel."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import hvdtrain
from hvdtrain import LocalTraining, ParameterAverager
from hvdtrain.averaging import flat_variables, parts
from hvdtrain.averaging.background import Background
from hvdtrain.averaging.flat_variables import FlatVariables
from hvdtrain.averaging.outer import Nesterov
from hvdtrain.averaging.period import Period
from hvdtrain.config import TrainConfig
from hvdtrain.data import Arrays
from hvdtrain.errors import UsageError
from hvdtrain.sampling import SamplePlan

hvdtrain.init()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "at least 1"),
        ({"outer": "nesterov", "outer_momentum": 2.0}, "at least 0 and below 1"),
        ({"outer": "nesterov", "outer_momentum": 1.0}, "at least 0 and below 1"),
        ({"outer": "nesterov", "outer_rate": 0.0}, "above 0 and at most 2"),
        ({"outer": "adam"}, "outer must be one of average, nesterov"),
        ({"slots": "reset"}, "slots must be one of average, keep"),
        ({"schedule": "linear"}, "schedule must be one of constant, adacomm"),
        ({"across": "rack"}, "across must be one of rank, host"),
        ({"after": -1}, "must be 0 or later"),
        ({"overlap": True, "slots": "average"}, "overlap and wait_free keep optimizer variables"),
        ({"wait_free": True, "slots": "average"}, "overlap and wait_free keep optimizer variables"),
        ({"wait_free": True, "across": "host"}, "make steps by themselves"),
        ({"wait_free": True, "schedule": "adacomm"}, "needs schedule='constant'"),
    ],
)
def test_options_have_rules(options, message):
    with pytest.raises(UsageError, match=message):
        LocalTraining(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"average_every": 8}, "--average-every is of --mode local. Received: 8 in sync mode"),
        ({"wait_free": True}, "--wait-free is of --mode local"),
        ({"mode": "local", "average_every": 0}, "--average-every must be at least 1"),
        ({"mode": "local", "op": "adasum"}, "--mode local averages"),
        ({"mode": "async"}, "--mode must be one of sync, local"),
    ],
)
def test_the_command_line_has_rules(options, message):
    with pytest.raises(UsageError, match=message):
        TrainConfig(**options)


def adam_model(**options) -> keras.Model:
    model = keras.Sequential(
        [layers.Input((5,)), layers.Dense(4, use_bias=False), layers.BatchNormalization(), layers.Dense(3)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(0.01, **options), loss=loss)
    return model


def test_wait_free_needs_somebody_to_wait_for():
    with pytest.raises(UsageError, match=r"wait for each other\. Received: 1 rank"):
        ParameterAverager(adam_model(), wait_free=True)


def test_state_that_has_no_average_is_refused():
    model = adam_model()
    model.optimizer.build(model.trainable_variables)
    model.optimizer.add_variable((), dtype="int32", name="count")
    with pytest.raises(UsageError, match=r"must be floats to be averaged\. Received: .*count.* of dtype int32"):
        ParameterAverager(model, slots="average")
    ParameterAverager(model, slots="keep")


def test_the_learning_rate_is_no_slot():
    model = adam_model()
    model.optimizer.build(model.trainable_variables)
    assert {id(variable) for variable in parts.slots(model)}.isdisjoint(
        {id(model.optimizer._learning_rate), id(model.optimizer._iterations)}
    )


def test_flat_tensors_hold_all_variables_and_are_copies(monkeypatch):
    monkeypatch.setattr(flat_variables, "_BUCKET_BYTES", 64)
    rng = np.random.default_rng(0)
    kinds = [((2, 3), "float32"), ((), "float16"), ((4,), "float64"), ((30,), "float32"), ((5,), "bfloat16")]
    variables = [keras.Variable(rng.normal(size=shape), dtype=kind) for shape, kind in kinds]
    flats = FlatVariables(variables)
    # Of the float32 ones, the large one is by itself.
    assert flats.num_tensors == 4
    assert flats.num_bytes == 4 * (6 + 1 + 30 + 5) + 8 * 4
    before = [variable.numpy() for variable in variables]
    read = flats.read()
    for variable in variables:
        variable.assign(tf.zeros_like(variable.value))
    assert sum(each.shape.num_elements() for each in read) == 46
    flats.assign(read)
    assert all(np.array_equal(v.numpy(), each) for v, each in zip(variables, before, strict=True))


def test_adacomm_goes_with_the_root_of_the_loss():
    """H = 10 * root of the loss, which was 1 at first, rounded up; it never grows again."""
    period = Period(LocalTraining(every=10, schedule="adacomm"))
    seen = []
    for loss in (1.0, 0.8, 0.26, 0.5, 9.0, 0.01):
        for _ in range(4):  # 160 steps of all ranks
            period.round_ended(loss * 40, 40)
        seen.append(period.steps)
    assert seen == [10, 9, 6, 6, 6, 1]
    again = Period(LocalTraining(every=10, schedule="adacomm"))
    again.restore(period.state())
    assert again.steps == 1
    assert again.state() == period.state()


def test_a_constant_period_stays():
    period = Period(LocalTraining(every=10))
    for _ in range(100):
        period.round_ended(0.0, 40)
    assert period.steps == 10


def test_nesterov_moves_further_where_displacements_agree():
    outer = Nesterov(rate=1.0, momentum=0.5)
    moves, velocity = outer.move([tf.constant([1.0])], ())
    assert moves[0].numpy() == 1.5
    moves, velocity = outer.move([tf.constant([1.0])], velocity)
    assert moves[0].numpy() == 1.75
    assert velocity[0].numpy() == 1.5


def test_an_error_in_the_background_is_raised_where_the_result_is_asked_for():
    release = threading.Event()

    def fail():
        release.wait(10)
        raise ValueError("cursed")

    background = Background(fail, "test")
    assert not background.is_done
    release.set()
    with pytest.raises(ValueError, match="cursed"):
        background.result()
    assert background.is_done


@pytest.mark.parametrize("remainder", ["pad", "drop"])
def test_own_samples_are_those_of_the_plan(remainder):
    plans = [SamplePlan(num_samples=245, batch_size=11, rank=rank, size=3, remainder=remainder) for rank in range(3)]
    epoch = plans[0].steps_per_epoch
    assert sum(plan.own_samples(0, epoch) for plan in plans) == plans[0].samples_per_epoch
    assert sum(plan.own_samples(epoch - 1, epoch + 1) for plan in plans) == sum(
        plan.own_samples(epoch - 1, 1) + plan.own_samples(0, epoch) for plan in plans
    )
    # Fewer samples than ranks in the last step: a filler is none.
    few = [SamplePlan(num_samples=34, batch_size=11, rank=rank, size=3) for rank in range(3)]
    assert sorted(plan.own_samples(1, 1) for plan in few) == [0, 0, 1]


def test_one_rank_trains_as_ever():
    rng = np.random.default_rng(0)
    data = Arrays(rng.normal(size=(70, 5)).astype(np.float32), rng.integers(0, 3, 70).astype(np.int32))
    weights = []
    for local in (None, LocalTraining(every=3)):
        keras.utils.set_random_seed(3)
        model = adam_model()
        summary = hvdtrain.Trainer(model, data, data, batch_size=16, epochs=3, local=local).fit()
        weights.append([each.numpy() for each in model.weights])
        assert summary["averaging_rounds"] == (0 if local is None else 5)
    for one, other in zip(*weights, strict=True):
        assert other == pytest.approx(one, abs=1e-5)
