"""On all ranks: hvdtrain.ParameterAverager, called directly."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from models import NUM_CLASSES, loss, relative_difference, values
from trainings import COLLECTIVES, RANK, SIZE, batchnorm_model, equal_on_all_ranks

import hvdtrain
from hvdtrain import LocalSGDConfig, ParameterAverager
from hvdtrain.errors import DisagreementError, UsageError
from hvdtrain.local_sgd import averaged_variables
from hvdtrain.local_sgd import fragment as fragment_module
from hvdtrain.system.background import BackgroundTask, ImmediateTask


def plain_model(seed: int = 1) -> keras.Model:
    keras.utils.set_random_seed(seed)
    model = batchnorm_model()
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss=loss())
    return model


def mean_over_ranks(arrays) -> list[np.ndarray]:
    return [np.mean(each, axis=0) for each in zip(*COLLECTIVES.allgather(arrays), strict=True)]


def move(model, seed: int) -> None:
    """Changes all weights of this rank, as training would."""
    rng = np.random.default_rng(100 * seed + RANK)
    for variable in model.weights:
        variable.assign_add(rng.normal(size=variable.shape).astype(np.float32))


def test_a_pending_average_keeps_the_steps_made_meanwhile():
    """CoCoD-SGD by hand: x <- average + (x now - x sent)."""
    model = plain_model()
    hvdtrain.broadcast(model)
    averager = ParameterAverager(model, LocalSGDConfig(sync_every=1, overlap=True), deterministic=True)
    move(model, 1)
    sent = values(model.weights)
    averager.step()
    average = mean_over_ranks(sent)
    move(model, 2)
    now = values(model.weights)
    expected = [a + (n - s) for a, n, s in zip(average, now, sent, strict=True)]
    averager.step()
    assert relative_difference(values(model.weights), expected) < 1e-6
    assert (averager.total_staleness_steps, averager.max_staleness_steps) == (1, 1)
    averager.finish()
    assert equal_on_all_ranks(values(model.weights))
    assert averager.rounds == 3


def test_each_variable_is_averaged_once():
    shared = layers.Dense(6)
    model = keras.Sequential(
        [
            layers.Input((6,)),
            shared,
            layers.BatchNormalization(),
            layers.Dropout(0.1),
            shared,
            layers.Dense(NUM_CLASSES),
        ]
    )
    frozen = keras.Sequential([layers.Input((6,)), layers.Dense(6)])
    frozen.trainable = False
    model = keras.Sequential([layers.Input((6,)), frozen, model])
    count = model.add_weight(name="count", shape=(), dtype="int32", trainable=False)
    optimizer = keras.optimizers.Adam(use_ema=True)
    model.compile(optimizer=optimizer, loss=loss())
    optimizer.build(model.trainable_variables)
    averaged = averaged_variables.trained(model) + averaged_variables.followed(model)
    slots = averaged_variables.slots(model)
    ids = [id(variable) for variable in averaged + slots]
    assert len(ids) == len(set(ids))
    floats = {id(v) for v in model.weights if "float" in v.dtype}
    assert floats <= set(ids)
    assert id(count) not in ids
    assert not any("seed" in variable.path for variable in averaged)
    # Each trainable variable has three more: two moments, and the EMA.
    trainable = len(model.trainable_variables)
    assert len(averaged) == len(floats) + trainable
    assert len(slots) == 2 * trainable
    # The allreduce is as large as all of them.
    hvdtrain.broadcast(model)
    averager = ParameterAverager(model, LocalSGDConfig(sync_every=1, average_slots="average"))
    averager.step()
    elements = sum(v.value.shape.num_elements() for v in averaged + slots)
    assert averager.bytes_reduced == 4 * (elements + 4)


def test_unchanged_variables_stay_bit_identical():
    model = plain_model()
    hvdtrain.broadcast(model)
    before = values(model.weights)
    averager = ParameterAverager(model, LocalSGDConfig(sync_every=1))
    for samples in (3, 5 + RANK, 7):
        averager.step(samples)
    assert all(np.array_equal(a, b) for a, b in zip(before, values(model.weights), strict=True))


def test_the_average_is_weighted_by_samples():
    model = plain_model()
    hvdtrain.broadcast(model)
    averager = ParameterAverager(model, LocalSGDConfig(sync_every=2))
    move(model, 1)
    own, weight = values(model.weights), 2 * (1 + 3 * RANK)
    all_ranks = COLLECTIVES.allgather((own, weight))
    total = sum(each[1] for each in all_ranks)
    expected = [sum(each[0][i] * each[1] for each in all_ranks) / total for i in range(len(own))]
    assert not averager.step(1 + 3 * RANK)
    assert averager.step(1 + 3 * RANK)
    assert relative_difference(values(model.weights), expected) < 1e-6
    assert averager.total_samples == total
    assert averager.total_steps == 2 * SIZE


@pytest.mark.parametrize("slots", ["average", "keep"])
def test_slots_are_averaged_or_kept(slots):
    model = plain_model()
    hvdtrain.broadcast(model)
    averager = ParameterAverager(model, LocalSGDConfig(sync_every=1, average_slots=slots))
    model.optimizer.variables[2].assign_add(tf.fill(model.optimizer.variables[2].shape, float(RANK + 1)))
    averager.step()
    value = model.optimizer.variables[2].numpy()
    assert np.allclose(value, (SIZE + 1) / 2 if slots == "average" else RANK + 1)


def test_nesterov_by_hand():
    model = plain_model()
    hvdtrain.broadcast(model)
    rate, momentum = 0.7, 0.9
    config = LocalSGDConfig(sync_every=1, outer="nesterov", outer_learning_rate=rate, outer_momentum=momentum)
    averager = ParameterAverager(model, config)
    anchor = values(model.trainable_variables)
    velocity = [np.zeros_like(each) for each in anchor]
    for round_number in (1, 2, 3):
        move(model, round_number)
        statistics = mean_over_ranks(values(model.non_trainable_weights))
        displacement = [m - a for m, a in zip(mean_over_ranks(values(model.trainable_variables)), anchor, strict=True)]
        velocity = [momentum * v + d for v, d in zip(velocity, displacement, strict=True)]
        anchor = [a + rate * (d + momentum * v) for a, d, v in zip(anchor, displacement, velocity, strict=True)]
        averager.step()
        assert relative_difference(values(model.trainable_variables), anchor) < 1e-5
        # The statistics of BatchNormalization have no momentum.
        assert relative_difference(values(model.non_trainable_weights), statistics) < 1e-5


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"wait_free": True}])
def test_ranks_may_make_different_numbers_of_steps(options):
    model = plain_model()
    hvdtrain.broadcast(model)
    averager = ParameterAverager(model, LocalSGDConfig(sync_every=4, **options))
    for step in range(6 + 5 * RANK):
        move(model, step)
        averager.step(samples=2)
    averager.finish()
    assert equal_on_all_ranks(values(model.weights))
    assert averager.total_samples == 2 * sum(6 + 5 * rank for rank in range(SIZE))
    assert len(set(COLLECTIVES.allgather(averager.rounds))) == 1


def test_averaged_sets_the_averaged_model_and_restores_the_ranks_own():
    model = plain_model()
    hvdtrain.broadcast(model)
    averager = ParameterAverager(model, LocalSGDConfig(sync_every=8))
    move(model, 3)
    averager.step()
    own = values(model.weights)
    with averager.averaged():
        assert relative_difference(values(model.weights), mean_over_ranks(own)) < 1e-6
        assert equal_on_all_ranks(values(model.weights))
    assert all(np.array_equal(a, b) for a, b in zip(own, values(model.weights), strict=True))


def test_ranks_with_different_options_are_refused():
    """They would wait for each other in different rounds."""
    with pytest.raises(DisagreementError, match=r"sync_every: 4 on .*, 5 on rank 1"):
        ParameterAverager(plain_model(), LocalSGDConfig(sync_every=5 if RANK == 1 else 4))


def test_a_distributed_optimizer_is_refused():
    model = plain_model()
    hvdtrain.DistributedOptimizer(model.optimizer)
    with pytest.raises(UsageError, match="leaves nothing to average"):
        ParameterAverager(model)


def test_a_checkpoint_of_ranks_that_have_merged_and_of_ranks_that_have_not(monkeypatch):
    """All ranks resume with the anchor of rank 0."""

    class Delayed(BackgroundTask):
        is_done = False

    monkeypatch.setattr(
        fragment_module, "BackgroundTask", (lambda function, name: ImmediateTask(function)) if RANK else Delayed
    )
    averagers = []
    for _ in range(2):
        model = plain_model()
        hvdtrain.broadcast(model)
        averagers.append((model, ParameterAverager(model, LocalSGDConfig(sync_every=2, overlap=True))))
    (model, averager), (again, resumed) = averagers
    for seed in (1, 2, 3):
        move(model, seed)
        averager.step()
    state, own = averager.state(), averager.rank_state()
    again.set_weights(model.get_weights())
    resumed.restore(COLLECTIVES.allgather(state)[0], own)
    for each in (averager, resumed):
        each.finish()
    assert equal_on_all_ranks(values(again.weights))
    assert all(np.array_equal(a, b) for a, b in zip(values(model.weights), values(again.weights), strict=True))
