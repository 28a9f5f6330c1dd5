"""On every rank: replicas that train alone and meet now and then."""

import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases_resume import StopAt, assert_same_end, make_trainer, stopped, what_a_run_comes_to
from keras import layers
from launcher import LONG
from models import NUM_CLASSES, loss, relative_difference, values
from trainings import COLLECTIVES, GLOBAL_BATCH, RANK, SIZE, STEPS, X, Y, batchnorm_model, compiled, tanh_model, trained

import hvdtrain
from hvdtrain import LocalTraining, ParameterAverager
from hvdtrain.averaging import averager as averager_module
from hvdtrain.averaging import parts
from hvdtrain.averaging.background import Background, Now
from hvdtrain.data import Arrays
from hvdtrain.errors import DisagreementError, UsageError
from hvdtrain.steps import CompiledSteps


def plain_model(seed: int = 1) -> keras.Model:
    keras.utils.set_random_seed(seed)
    model = batchnorm_model()
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss=loss())
    return model


def mean_over_ranks(arrays) -> list[np.ndarray]:
    return [np.mean(each, axis=0) for each in zip(*COLLECTIVES.allgather(arrays), strict=True)]


def move(model, seed: int) -> None:
    """Changes all float weights of this rank, as training would."""
    rng = np.random.default_rng(100 * seed + RANK)
    for variable in model.weights:
        variable.assign_add(rng.normal(size=variable.shape).astype(np.float32))


def equal_on_all_ranks(arrays) -> bool:
    everyone = COLLECTIVES.allgather(arrays)
    return all(np.array_equal(a, b) for other in everyone for a, b in zip(arrays, other, strict=True))


@pytest.mark.parametrize("clipped", [False, True])
def test_an_average_at_every_step_equals_sync(clipped):
    """Plain SGD; the last step of an epoch gives ranks unequal numbers of samples."""
    options = {"clipvalue": 1e9} if clipped else {}
    local, summary = trained(tanh_model, keras.optimizers.SGD(0.1, **options), local=LocalTraining(every=1))
    sync, reference = trained(tanh_model, keras.optimizers.SGD(0.1, **options))
    assert relative_difference(values(local.weights), values(sync.weights)) < 1e-6
    assert summary["samples"] == reference["samples"]
    assert summary["averaging_rounds"] == STEPS
    assert summary["mode"] == "local"


def test_an_average_that_arrives_at_once_is_not_late(monkeypatch):
    expected, _ = trained(batchnorm_model, "adam", local=LocalTraining(every=3))
    monkeypatch.setattr(averager_module, "Background", lambda function, name: Now(function))
    monkeypatch.setattr(
        "hvdtrain.modes.local.ParameterAverager",
        lambda *args, **options: ParameterAverager(*args, **{**options, "deterministic": False}),
    )
    model, summary = trained(batchnorm_model, "adam", local=LocalTraining(every=3, overlap=True))
    assert all(np.array_equal(a, b) for a, b in zip(values(expected.weights), values(model.weights), strict=True))
    assert summary["average_late_steps"] == {"mean": 0, "max": 0}


@pytest.mark.parametrize("wait_free", [False, True])
def test_an_average_may_arrive_at_different_times(wait_free, monkeypatch):
    """At once on the first rank, much later on the others; they evaluate and stop together all the same."""

    class Late(Background):
        def __init__(self, function, name):
            super().__init__(lambda: (function(), time.sleep(0.1))[0], name)

    monkeypatch.setattr(averager_module, "Background", Late if RANK else lambda function, name: Now(function))
    monkeypatch.setattr(
        "hvdtrain.modes.local.ParameterAverager",
        lambda *args, **options: ParameterAverager(*args, **{**options, "deterministic": False}),
    )
    local = LocalTraining(every=3, overlap=True, wait_free=wait_free)
    model, summary = trained(tanh_model, "adam", evaluation=Arrays(X, Y), eval_every=3, local=local, check_every=3)
    assert equal_on_all_ranks(values(model.weights))
    assert wait_free or summary["averaging_rounds"] == STEPS // 3 + 1


def test_a_late_average_keeps_the_steps_made_meanwhile():
    """CoCoD-SGD by hand: x <- average + (x now - x sent)."""
    model = plain_model()
    hvdtrain.broadcast(model)
    averager = ParameterAverager(model, every=1, overlap=True, deterministic=True)
    move(model, 1)
    sent = values(model.weights)
    averager.step()
    average = mean_over_ranks(sent)
    move(model, 2)
    now = values(model.weights)
    expected = [a + (n - s) for a, n, s in zip(average, now, sent, strict=True)]
    averager.step()
    assert relative_difference(values(model.weights), expected) < 1e-6
    assert (averager.late_steps, averager.most_late_steps) == (1, 1)
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
    averaged = parts.trained(model) + parts.followed(model)
    slots = parts.slots(model)
    ids = [id(variable) for variable in averaged + slots]
    assert len(ids) == len(set(ids))
    floats = {id(v) for v in model.weights if "float" in v.dtype}
    assert floats <= set(ids)
    assert id(count) not in ids
    assert not any("seed" in variable.path for variable in averaged)
    # Three more for each trainable variable: two moments, and the moving average.
    trainable = len(model.trainable_variables)
    assert len(averaged) == len(floats) + trainable
    assert len(slots) == 2 * trainable
    # And what travels is as large as all of them.
    hvdtrain.broadcast(model)
    averager = ParameterAverager(model, every=1, slots="average")
    averager.step()
    elements = sum(v.value.shape.num_elements() for v in averaged + slots)
    assert averager.bytes_reduced == 4 * (elements + 4)


def test_what_nobody_has_moved_keeps_its_bits():
    model = plain_model()
    hvdtrain.broadcast(model)
    before = values(model.weights)
    averager = ParameterAverager(model, every=1)
    for samples in (3, 5 + RANK, 7):
        averager.step(samples)
    assert all(np.array_equal(a, b) for a, b in zip(before, values(model.weights), strict=True))


def test_the_average_weighs_by_samples():
    model = plain_model()
    hvdtrain.broadcast(model)
    averager = ParameterAverager(model, every=2)
    move(model, 1)
    own, weight = values(model.weights), 2 * (1 + 3 * RANK)
    everyone = COLLECTIVES.allgather((own, weight))
    total = sum(each[1] for each in everyone)
    expected = [sum(each[0][i] * each[1] for each in everyone) / total for i in range(len(own))]
    assert not averager.step(1 + 3 * RANK)
    assert averager.step(1 + 3 * RANK)
    assert relative_difference(values(model.weights), expected) < 1e-6
    assert averager.total_samples == total
    assert averager.total_steps == 2 * SIZE


@pytest.mark.parametrize("slots", ["average", "keep"])
def test_slots_are_averaged_where_it_is_asked_for(slots):
    model = plain_model()
    hvdtrain.broadcast(model)
    averager = ParameterAverager(model, every=1, slots=slots)
    model.optimizer.variables[2].assign_add(tf.fill(model.optimizer.variables[2].shape, float(RANK + 1)))
    averager.step()
    value = model.optimizer.variables[2].numpy()
    assert np.allclose(value, (SIZE + 1) / 2 if slots == "average" else RANK + 1)


def test_nesterov_by_hand():
    model = plain_model()
    hvdtrain.broadcast(model)
    rate, momentum = 0.7, 0.9
    averager = ParameterAverager(model, every=1, outer="nesterov", outer_rate=rate, outer_momentum=momentum)
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
        # BatchNormalization's statistics follow no momentum.
        assert relative_difference(values(model.non_trainable_weights), statistics) < 1e-5


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"wait_free": True}])
def test_ranks_may_make_different_numbers_of_steps(options):
    model = plain_model()
    hvdtrain.broadcast(model)
    averager = ParameterAverager(model, every=4, **options)
    for step in range(6 + 5 * RANK):
        move(model, step)
        averager.step(samples=2)
    averager.finish()
    assert equal_on_all_ranks(values(model.weights))
    assert averager.total_samples == 2 * sum(6 + 5 * rank for rank in range(SIZE))
    assert len(set(COLLECTIVES.allgather(averager.rounds))) == 1


def test_others_see_the_averaged_model_and_the_rank_its_own():
    model = plain_model()
    hvdtrain.broadcast(model)
    averager = ParameterAverager(model, every=8)
    move(model, 3)
    averager.step()
    own = values(model.weights)
    with averager.averaged():
        assert relative_difference(values(model.weights), mean_over_ranks(own)) < 1e-6
        assert equal_on_all_ranks(values(model.weights))
    assert all(np.array_equal(a, b) for a, b in zip(own, values(model.weights), strict=True))


class Looks(keras.callbacks.Callback):
    """What a callback finds in the model at the end of an epoch and in an evaluation."""

    def __init__(self):
        super().__init__()
        self.weights = []

    def on_epoch_end(self, epoch, logs=None):
        self.weights.append(values(self.model.weights))

    def on_test_end(self, logs=None):
        self.weights.append(values(self.model.weights))


def test_callbacks_and_evaluations_see_the_averaged_model_and_change_nothing():
    looks, local = Looks(), LocalTraining(every=5)
    _, summary = trained(batchnorm_model, "adam", Arrays(X, Y), local=local)
    watched, seen = trained(
        batchnorm_model, "adam", Arrays(X, Y), evaluation=Arrays(X, Y), eval_every=3, local=local, callbacks=[looks]
    )
    assert len(looks.weights) > 8
    assert all(equal_on_all_ranks(weights) for weights in looks.weights)
    assert seen["weights_sha256"] == summary["weights_sha256"]
    assert seen["eval"]["loss"] == pytest.approx(float(watched.evaluate(X, Y, verbose=0)[0]), rel=1e-5)


def test_bytes_are_a_share_of_those_of_sync():
    """A ring sends 2 (N - 1) / N of what it is handed, in both modes."""

    def wide_model() -> keras.Model:
        return keras.Sequential([layers.Input((6,)), layers.Dense(512, activation="tanh"), layers.Dense(NUM_CLASSES)])

    _, sync = trained(wide_model, keras.optimizers.SGD(0.1))
    for every in (4, 8):
        _, local = trained(wide_model, keras.optimizers.SGD(0.1), local=LocalTraining(every=every))
        assert local["bytes_reduced"] / sync["bytes_reduced"] == pytest.approx(1 / every, rel=0.02)


def test_sync_first_then_local():
    after = 10
    local = LocalTraining(every=4, after=after)
    _, summary = trained(tanh_model, keras.optimizers.SGD(0.1, momentum=0.9), local=local)
    assert summary["averaging_rounds"] == -(-(STEPS - after) // 4)
    # Until then it is sync training; and with an average at every step it stays that.
    one, _ = trained(tanh_model, keras.optimizers.SGD(0.1), local=LocalTraining(every=1, after=after))
    two, _ = trained(tanh_model, keras.optimizers.SGD(0.1))
    assert relative_difference(values(one.weights), values(two.weights)) < 1e-6


def test_the_period_shrinks_with_the_loss():
    """Few samples, which the model learns by heart."""
    rounds = []
    for schedule in ("constant", "adacomm"):
        local = LocalTraining(every=8, schedule=schedule)
        few, options = Arrays(X[:GLOBAL_BATCH], Y[:GLOBAL_BATCH]), {"steps": 320, "steps_per_call": 4}
        _, summary = trained(tanh_model, keras.optimizers.Adam(0.02), few, local=local, **options)
        rounds.append(summary["averaging_rounds"])
    assert rounds[0] == 40
    assert rounds[1] > 60


COMBINATIONS = {
    "average": LocalTraining(every=5, slots="average"),
    "keep": LocalTraining(every=5),
    "nesterov": LocalTraining(every=5, outer="nesterov", slots="average"),
    "overlap": LocalTraining(every=4, overlap=True),
    "overlap, nesterov, sync first": LocalTraining(every=4, overlap=True, outer="nesterov", after=6),
    "sync first, stopped in it": LocalTraining(every=3, after=15),
    "adacomm": LocalTraining(every=2, schedule="adacomm", slots="average"),
}


@pytest.mark.parametrize(
    # The long ones are in others of them.
    "name",
    [LONG(name) if name in ("keep", "nesterov", "overlap") else name for name in COMBINATIONS],
)
def test_stopped_and_gone_on_equals_straight(name, folder, watch):
    local = COMBINATIONS[name]

    def adam():
        return keras.optimizers.Adam(0.01, use_ema=name == "keep")

    straight = make_trainer(adam, local=local)
    end = what_a_run_comes_to(straight, straight.fit())
    trainer = make_trainer(adam, folder, callbacks=[StopAt(watch, 11)], watch=watch, local=local)
    # In the middle of a round, with an average on its way.
    assert 10 <= stopped(trainer) < 16
    again = make_trainer(adam, folder, weights=7, local=local)
    assert_same_end(what_a_run_comes_to(again, again.fit()), end)


def test_a_checkpoint_of_other_training_is_refused(folder):
    make_trainer(lambda: keras.optimizers.Adam(0.01), folder, steps=3, local=LocalTraining(every=2)).fit()
    with pytest.raises(Exception, match=r"local training: .* there, no here"):
        make_trainer(lambda: keras.optimizers.Adam(0.01), folder).fit()


@pytest.fixture
def slow_last_rank(monkeypatch, folder):
    """It goes on when the first rank has made three times its steps; gives the list of the steps that each call made.

    By steps, not by time: how fast a rank is says nothing on a machine that others use too.
    """
    train, made = CompiledSteps.train, []
    first_rank = folder.with_name(f"{folder.name}, a byte for each step of the first rank")
    first_rank.touch()

    def train_slowly(self, iterator, steps):
        give_up = time.monotonic() + 10  # The first rank may have ended.
        while RANK == SIZE - 1 and first_rank.stat().st_size < 3 * sum(made) and time.monotonic() < give_up:
            time.sleep(0.01)
        train(self, iterator, steps)
        made.append(steps)
        if RANK == 0:
            with first_rank.open("ab") as file:
                file.write(bytes(steps))

    monkeypatch.setattr(CompiledSteps, "train", train_slowly)
    return made


def test_nobody_waits_for_a_slow_rank(slow_last_rank):
    local = LocalTraining(every=4, wait_free=True)
    model, summary = trained(tanh_model, keras.optimizers.SGD(0.05), local=local, steps=60)
    steps = COLLECTIVES.allgather(sum(slow_last_rank))
    assert min(steps) == steps[-1]
    assert max(steps) > 2 * steps[-1]
    assert equal_on_all_ranks(values(model.weights))
    assert summary["steps"] == 60
    assert sum(steps) // SIZE >= 60
    # Each sample that a rank has drawn is counted: all of a batch, or what the end of an epoch has left for it.
    plan = hvdtrain.Trainer(model, Arrays(X, Y), batch_size=GLOBAL_BATCH // SIZE, steps=1).plan
    assert summary["samples"] == sum(COLLECTIVES.allgather(plan.own_samples(0, sum(slow_last_rank))))


def test_a_wait_free_run_stops_and_goes_on(folder, watch, slow_last_rank):
    local = LocalTraining(every=3, wait_free=True)

    def adam():
        return keras.optimizers.Adam(0.01)

    trainer = make_trainer(adam, folder, callbacks=[StopAt(watch, 2)], watch=watch, local=local, steps=300)
    step = stopped(trainer)
    assert step < 300
    state = [v.numpy() for v in trainer.model.variables] + values(trainer.model.optimizer.variables)
    own_steps = trainer._steps.steps_made
    again = make_trainer(adam, folder, weights=7, local=local, steps=300)
    assert again.prepare().step == step
    restored = [v.numpy() for v in again.model.variables] + values(again.model.optimizer.variables)
    assert all(np.array_equal(a, b) for a, b in zip(state, restored, strict=True))
    assert again._steps.steps_made == own_steps
    assert again.fit()["steps"] == 300
    assert equal_on_all_ranks(values(again.model.weights))


def test_a_stop_ends_a_wait_free_round_at_once(folder, watch):
    local = LocalTraining(every=1_000_000, wait_free=True)
    trainer = make_trainer(lambda: keras.optimizers.SGD(0.01), folder, watch=watch, local=local, steps=10_000_000)
    if RANK == SIZE - 1:
        threading.Timer(2.0, lambda: watch.request_stop("a test")).start()
    stopped(trainer)
    assert trainer._steps.steps_made < 1_000_000


def test_a_rank_that_skips_steps_holds_up_nobody():
    x = X.copy()
    x[3] = np.nan
    _, summary = trained(
        tanh_model, keras.optimizers.SGD(0.05), Arrays(x, Y), local=LocalTraining(every=4), on_nan="skip", log_every=1
    )
    assert np.isfinite(summary["loss"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"accumulate": 2}, "accumulate saves reductions"),
        ({"sync_batchnorm": True}, "needs them in step"),
    ],
)
def test_what_does_not_go_with_local_training(arguments, message):
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=arguments.get("accumulate"))
    model = compiled(batchnorm_model, optimizer)
    with pytest.raises(UsageError, match=message):
        hvdtrain.Trainer(model, Arrays(X, Y), batch_size=8, steps=3, local=LocalTraining(), **arguments)


def test_ranks_with_other_options_are_refused():
    """Which would wait for each other in different rounds otherwise."""
    with pytest.raises(DisagreementError, match=r"every: 4 on .*, 5 on rank 1"):
        ParameterAverager(plain_model(), every=5 if RANK == 1 else 4)


def test_a_distributed_optimizer_is_refused():
    model = plain_model()
    hvdtrain.DistributedOptimizer(model.optimizer)
    with pytest.raises(UsageError, match="leaves nothing to average"):
        ParameterAverager(model, every=1)
