"""On all ranks: local SGD that averages one fragment of the model at a time."""

import itertools
import time

import keras
import numpy as np
import pytest
from fragments_by_hand import Algorithm, simulate
from keras import layers
from models import NUM_CLASSES, loss, relative_difference, values
from stopped_runs import StopAt, assert_same_results, make_run, results_of, stopped
from trainings import COLLECTIVES, RANK, SIZE, STEPS, X, Y, equal_on_all_ranks, trained

import hvdtrain
from hvdtrain import LocalSGDConfig, ParameterAverager
from hvdtrain.data import Arrays
from hvdtrain.local_sgd import averaged_variables
from hvdtrain.local_sgd import fragment as fragment_module
from hvdtrain.local_sgd.flat_variables import num_bytes
from hvdtrain.local_sgd.fragment_division import divided
from hvdtrain.system.background import BackgroundTask, ImmediateTask


def deep_model() -> keras.Model:
    return keras.Sequential(
        [
            layers.Input((6,)),
            layers.Dense(20, "tanh"),
            layers.BatchNormalization(momentum=0.9),
            layers.Dense(16, "tanh"),
            layers.Dense(16, "tanh"),
            layers.Dense(NUM_CLASSES),
        ]
    )


def plain_model() -> keras.Model:
    keras.utils.set_random_seed(1)
    model = deep_model()
    model.compile(keras.optimizers.SGD(0.1), loss())
    hvdtrain.broadcast(model)
    return model


def division_of(model: keras.Model, count: int) -> list[list[int]]:
    places = {id(variable): place for place, variable in enumerate(model.weights)}
    fragments = divided(averaged_variables.trained(model), averaged_variables.followed(model), count)
    return [[places[id(each)] for each in (*fragment.trained, *fragment.followed)] for fragment in fragments]


def move_of(model: keras.Model):
    """What a step of a rank does to its weights, and its samples: some rank sees none in some steps."""
    shapes = [each.shape for each in model.weights]

    def move(rank: int, step: int):
        rng = np.random.default_rng((7, rank, step))
        return [rng.normal(size=shape).astype(np.float32) for shape in shapes], (step + 3 * rank) % 5

    return move


ALGORITHMS = {
    "3 fragments": {"sync_every": 6, "fragments": 3},
    "rounds of different lengths, nesterov": {"sync_every": 5, "fragments": 2, "outer": "nesterov"},
    "delay, half of the average": {
        **{"sync_every": 6, "fragments": 3, "overlap": True, "fragment_delay": 1, "merge_alpha": 0.5}
    },
    "several on their way": {"sync_every": 6, "fragments": 3, "overlap": True, "fragment_delay": 5},
    "delay of a whole cycle": {
        **{"sync_every": 4, "fragments": 2, "overlap": True, "fragment_delay": 4, "merge_alpha": 0.5},
        "outer": "nesterov",
    },
    "one fragment": {"sync_every": 4, "overlap": True, "fragment_delay": 2, "merge_alpha": 0.3},
    "a part of the average at once": {"sync_every": 4, "fragments": 4, "merge_alpha": 0.7},
}


@pytest.mark.parametrize("additional_steps", [0, 5])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_each_rank_has_the_values_of_the_simulation_after_each_step(name, additional_steps):
    model, config = plain_model(), LocalSGDConfig(**ALGORITHMS[name])
    algorithm = Algorithm(
        division_of(model, config.fragments),
        {place for place, each in enumerate(model.weights) if each.trainable},
        config.sync_every,
        config.fragment_delay or 0,
        config.merge_alpha,
        (config.outer_learning_rate, config.outer_momentum) if config.outer == "nesterov" else None,
    )
    move, steps = move_of(model), [13 + additional_steps * rank for rank in range(SIZE)]
    final, histories = simulate(values(model.weights), algorithm, move, steps)
    averager = ParameterAverager(model, config)
    for step in range(steps[RANK]):
        moves, samples = move(RANK, step)
        for variable, change in zip(model.weights, moves, strict=True):
            variable.assign_add(change)
        averager.step(samples)
        assert relative_difference(values(model.weights), histories[RANK][step]) < 1e-5, step
    averager.finish()
    assert relative_difference(values(model.weights), final) < 1e-5
    assert equal_on_all_ranks(values(model.weights))
    # Each sample once in each fragment.
    assert averager.total_samples == sum(move(rank, step)[1] for rank in range(SIZE) for step in range(steps[rank]))
    assert averager.total_steps == sum(steps)


def moved_with(averager: ParameterAverager, model: keras.Model, steps: range) -> None:
    move = move_of(model)
    for step in steps:
        moves, samples = move(RANK, step)
        for variable, change in zip(model.weights, moves, strict=True):
            variable.assign_add(change)
        averager.step(samples)


@pytest.mark.parametrize("name", ["3 fragments", "several on their way", "delay of a whole cycle"])
@pytest.mark.parametrize("steps", [9, 12])
def test_the_averaged_model_is_what_finish_produces(name, steps):
    model = plain_model()
    averager = ParameterAverager(model, LocalSGDConfig(**ALGORITHMS[name]))
    moved_with(averager, model, range(steps))
    own = values(model.weights)
    with averager.averaged():
        seen = values(model.weights)
        assert equal_on_all_ranks(seen)
    assert all(np.array_equal(a, b) for a, b in zip(own, values(model.weights), strict=True))
    averager.finish()
    assert relative_difference(values(model.weights), seen) < 1e-6


@pytest.mark.parametrize("sync_dtype", ["float32", "int8"])
@pytest.mark.parametrize("count", [2, 4])
def test_a_round_sends_a_part_of_the_model(count, sync_dtype):
    model = plain_model()
    config = LocalSGDConfig(sync_every=4, fragments=count, sync_dtype=sync_dtype)
    averager, sent = ParameterAverager(model, config), [0]
    for _ in range(8):
        averager.step()
        sent.append(averager.bytes_reduced)
    rounds = [after - before for before, after in itertools.pairwise(sent) if after > before]
    assert len(rounds) == 2 * count
    assert max(rounds) == averager.largest_round_bytes
    if sync_dtype == "float32":
        facts = 4 * 4
        largest = max(num_bytes(layer.weights) for layer in model.layers)
        assert max(rounds) <= num_bytes(model.weights) / count + largest + facts
        assert sum(rounds) == 2 * (num_bytes(model.weights) + count * facts)


def test_the_delay_of_a_round_is_what_a_deterministic_job_does():
    """A whole round, with one fragment."""
    weights = []
    for delay in (None, 4, 3):
        model, config = plain_model(), LocalSGDConfig(sync_every=4, overlap=True, fragment_delay=delay)
        averager = ParameterAverager(model, config, deterministic=delay is None)
        moved_with(averager, model, range(11))
        weights.append(values(model.weights))
        averager.finish()
    assert all(np.array_equal(a, b) for a, b in zip(*weights[:2], strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(*weights[1:], strict=True))


def test_with_a_delay_results_do_not_depend_on_timing(monkeypatch):
    """An average is complete at once, or long after it was due."""

    class Delayed(BackgroundTask):
        def __init__(self, function, name):
            super().__init__(lambda: (time.sleep(0.05), function())[1], name)

    weights = []
    for make in (lambda function, name: ImmediateTask(function), Delayed):
        monkeypatch.setattr(fragment_module, "BackgroundTask", make)
        model = plain_model()
        averager = ParameterAverager(model, LocalSGDConfig(**ALGORITHMS["several on their way"], outer="nesterov"))
        moved_with(averager, model, range(15))
        averager.finish()
        weights.append(values(model.weights))
    assert all(np.array_equal(a, b) for a, b in zip(*weights, strict=True))


EVERYTHING = {
    **{"mode": "local", "sync_every": 6, "fragments": 3, "overlap": True, "fragment_delay": 4},
    **{"sync_dtype": "int4", "outer": "nesterov", "merge_alpha": 0.5},
}
RESUMED = {
    "everything": EVERYTHING,
    "fragments": {"mode": "local", "sync_every": 6, "fragments": 4, "average_slots": "average"},
    "post-local": {**EVERYTHING, "sync_steps_first": 5, "sync_dtype": "int8"},
}


@pytest.mark.parametrize(
    "name", [name if name == "everything" else pytest.param(name, marks=pytest.mark.long) for name in RESUMED]
)
def test_stopped_and_resumed_equals_uninterrupted(name, folder, watch):
    options = {**RESUMED[name], "make_model": deep_model}
    adam = lambda: keras.optimizers.Adam(0.01, use_ema=True)
    uninterrupted = make_run(adam, **options)
    end = results_of(uninterrupted, uninterrupted.fit())
    trainer = make_run(adam, folder, callbacks=[StopAt(watch, 11)], job_watch=watch, **options)
    # In the middle of a cycle; with a delay, two averages are pending.
    assert 10 <= stopped(trainer) < 16
    resumed = make_run(adam, folder, weights=300 + RANK, **options)
    assert_same_results(results_of(resumed, resumed.fit()), end)


def test_on_other_ranks_a_new_cycle_starts_with_the_averaged_model():
    config = LocalSGDConfig(sync_every=6, fragments=3, outer="nesterov", overlap=True, fragment_delay=3)
    model = plain_model()
    averager = ParameterAverager(model, config)
    moved_with(averager, model, range(9))
    state = averager.state()
    with averager.averaged():
        start = values(model.weights)
    again = plain_model()
    again.set_weights(start)
    resumed = ParameterAverager(again, config, starts=False)
    resumed.restore(COLLECTIVES.allgather(state)[0], None)
    resumed.start()
    assert resumed.steps_until_due == 2
    # Of the old cycle, only the momentum is left.
    moved_with(resumed, again, range(2))
    assert resumed.bytes_reduced == num_bytes(again.weights[place] for place in division_of(again, 3)[0]) + 16
    resumed.finish()
    assert equal_on_all_ranks(values(again.weights))
    total = sum(move_of(again)(rank, step)[1] for rank in range(SIZE) for step in range(2))
    assert resumed.total_samples - state["total_samples"] == total


def test_evaluations_change_nothing_and_see_equal_replicas():
    options = {**EVERYTHING, "sync_dtype": "float32"}  # After the last round, weights have its rounding.
    _, plain = trained(deep_model, "adam", Arrays(X, Y), **options)
    model, evaluated = trained(deep_model, "adam", Arrays(X, Y), evaluation=Arrays(X, Y), eval_every=5, **options)
    assert evaluated["weights_sha256"] == plain["weights_sha256"]
    assert evaluated["eval"]["loss"] == pytest.approx(float(model.evaluate(X, Y, verbose=0)[0]), rel=1e-5)
    assert equal_on_all_ranks(values(model.weights))
    assert plain["average_late_steps"]["max"] == 4


def test_fragments_learn():
    """As well as the whole model at once, in a task that can be learnt."""
    rng = np.random.default_rng(5)
    labels = np.argmax(X @ rng.normal(size=(X.shape[1], NUM_CLASSES)), axis=1).astype(np.int32)
    losses = []
    for options in ({"mode": "local", "sync_every": 6}, {**EVERYTHING, "outer_momentum": 0.5}):
        _, summary = trained(
            deep_model,
            keras.optimizers.Adam(0.03),
            Arrays(X, labels),
            evaluation=Arrays(X, labels),
            **{**options, "steps": 4 * STEPS},
        )
        losses.append(summary["eval"]["loss"])
    assert max(losses) < 0.3


@pytest.mark.parametrize("merge_alpha", [1.0, 0.5])
def test_ranks_that_wait_for_none_may_keep_a_part_of_their_own(merge_alpha):
    model = plain_model()
    averager = ParameterAverager(model, LocalSGDConfig(sync_every=4, wait_free=True, merge_alpha=merge_alpha))
    moved_with(averager, model, range(6 + 5 * RANK))
    averager.finish()
    assert equal_on_all_ranks(values(model.weights))
