"""On all ranks: local SGD in the trainer."""

import threading
import time

import keras
import numpy as np
import pytest
from keras import layers
from models import NUM_CLASSES, relative_difference, values
from noted_findings import noted_findings
from stopped_runs import StopAt, assert_same_results, make_run, results_of, stopped
from trainers import make_trainer
from trainings import (
    COLLECTIVES,
    GLOBAL_BATCH,
    RANK,
    SIZE,
    STEPS,
    Warnings,
    X,
    Y,
    batchnorm_model,
    compiled,
    equal_on_all_ranks,
    tanh_model,
    trained,
)

from hvdtrain import ParameterAverager
from hvdtrain.data import Arrays
from hvdtrain.errors import JobError, UsageError
from hvdtrain.local_sgd import fragment as fragment_module
from hvdtrain.system.background import BackgroundTask, ImmediateTask
from hvdtrain.training.equality import scheduled_check
from hvdtrain.training.train_step import TrainStep


@pytest.mark.parametrize("clipped", [False, True])
def test_averaging_at_every_step_equals_sync_mode(clipped):
    """Plain SGD; in the last step of an epoch, ranks have different numbers of samples."""
    options = {"clipvalue": 1e9} if clipped else {}
    local, summary = trained(tanh_model, keras.optimizers.SGD(0.1, **options), mode="local", sync_every=1)
    sync, reference = trained(tanh_model, keras.optimizers.SGD(0.1, **options))
    assert relative_difference(values(local.weights), values(sync.weights)) < 1e-6
    assert summary["samples"] == reference["samples"]
    assert summary["averaging_rounds"] == STEPS
    assert summary["mode"] == "local"


def test_an_average_that_is_ready_at_once_is_not_stale(monkeypatch):
    expected, _ = trained(batchnorm_model, "adam", mode="local", sync_every=3)
    monkeypatch.setattr(fragment_module, "BackgroundTask", lambda function, name: ImmediateTask(function))
    monkeypatch.setattr(
        "hvdtrain.training.strategies.local.ParameterAverager",
        lambda *args, **options: ParameterAverager(*args, **{**options, "deterministic": False}),
    )
    model, summary = trained(batchnorm_model, "adam", mode="local", sync_every=3, overlap=True)
    assert all(np.array_equal(a, b) for a, b in zip(values(expected.weights), values(model.weights), strict=True))
    assert summary["average_late_steps"] == {"mean": 0, "max": 0}


@pytest.mark.parametrize("wait_free", [False, True])
def test_an_average_may_be_ready_at_different_times(wait_free, monkeypatch):
    """At once on rank 0, much later on the others; all still evaluate and stop together."""

    class Delayed(BackgroundTask):
        def __init__(self, function, name):
            super().__init__(lambda: (function(), time.sleep(0.1))[0], name)

    monkeypatch.setattr(
        fragment_module, "BackgroundTask", Delayed if RANK else lambda function, name: ImmediateTask(function)
    )
    monkeypatch.setattr(
        "hvdtrain.training.strategies.local.ParameterAverager",
        lambda *args, **options: ParameterAverager(*args, **{**options, "deterministic": False}),
    )
    local = {"mode": "local", "sync_every": 3, "overlap": True, "wait_free": wait_free}
    model, summary = trained(tanh_model, "adam", evaluation=Arrays(X, Y), eval_every=3, check_every=3, **local)
    assert equal_on_all_ranks(values(model.weights))
    assert wait_free or summary["averaging_rounds"] == STEPS // 3 + 1


class WeightsRecorder(keras.callbacks.Callback):
    """Records the model's weights at the end of each epoch and evaluation."""

    def __init__(self):
        super().__init__()
        self.weights = []

    def on_epoch_end(self, epoch, logs=None):
        self.weights.append(values(self.model.weights))

    def on_test_end(self, logs=None):
        self.weights.append(values(self.model.weights))


def test_callbacks_and_evaluations_see_the_averaged_model_and_change_nothing():
    recorder, local = WeightsRecorder(), {"mode": "local", "sync_every": 5}
    _, summary = trained(batchnorm_model, "adam", Arrays(X, Y), **local)
    model, evaluated = trained(
        batchnorm_model, "adam", Arrays(X, Y), evaluation=Arrays(X, Y), eval_every=3, callbacks=[recorder], **local
    )
    assert len(recorder.weights) > 8
    assert all(equal_on_all_ranks(weights) for weights in recorder.weights)
    assert evaluated["weights_sha256"] == summary["weights_sha256"]
    assert evaluated["eval"]["loss"] == pytest.approx(float(model.evaluate(X, Y, verbose=0)[0]), rel=1e-5)


def test_bytes_are_a_fraction_of_those_of_sync_mode():
    """A ring allreduce sends 2 (N - 1) / N of its input, in both modes."""

    def wide_model() -> keras.Model:
        return keras.Sequential([layers.Input((6,)), layers.Dense(512, activation="tanh"), layers.Dense(NUM_CLASSES)])

    _, sync = trained(wide_model, keras.optimizers.SGD(0.1))
    for every in (4, 8):
        _, local = trained(wide_model, keras.optimizers.SGD(0.1), mode="local", sync_every=every)
        assert local["bytes_reduced"] / sync["bytes_reduced"] == pytest.approx(1 / every, rel=0.02)


def test_post_local_sgd():
    after = 10
    local = {"mode": "local", "sync_every": 4, "sync_steps_first": after}
    _, summary = trained(tanh_model, keras.optimizers.SGD(0.1, momentum=0.9), **local)
    assert summary["averaging_rounds"] == -(-(STEPS - after) // 4)
    # Until then it equals sync mode; with an average at every step, it does so to the end.
    one, _ = trained(tanh_model, keras.optimizers.SGD(0.1), mode="local", sync_every=1, sync_steps_first=after)
    two, _ = trained(tanh_model, keras.optimizers.SGD(0.1))
    assert relative_difference(values(one.weights), values(two.weights)) < 1e-6


@pytest.mark.parametrize(
    ("sync_steps_first", "checks"),
    [pytest.param(0, 0, marks=pytest.mark.long), (1, 1), pytest.param(20, 2, marks=pytest.mark.long)],
)
def test_the_synchronous_steps_are_checked(sync_steps_first, checks, monkeypatch):
    """The first one, and when the next check is due, which its cost would delay."""
    findings = noted_findings(monkeypatch)
    monkeypatch.setattr(scheduled_check, "_MAX_SHARE_OF_TIME", 1e9)
    trained(tanh_model, "adam", mode="local", sync_every=4, sync_steps_first=sync_steps_first)
    assert len(findings) == checks
    assert {each.unequal or each.unchecked for each in findings} <= {None}


def test_adacomm_keeps_its_interval_while_the_loss_is_constant():
    """In calls as long as an epoch, at whose beginning metrics are reset."""
    count = 10 * GLOBAL_BATCH
    _, summary = trained(
        tanh_model,
        keras.optimizers.SGD(0.0),
        Arrays(np.tile(X[:1], (count, 1)), np.tile(Y[:1], count)),
        mode="local",
        steps=320,
        steps_per_execution=10,
        sync_every=10,
        sync_schedule="adacomm",
    )
    assert summary["averaging_rounds"] == 32


def test_adacomm_shortens_rounds_as_the_loss_falls():
    """Few samples, which the model can memorize."""
    rounds = []
    for schedule in ("constant", "adacomm"):
        local = {"mode": "local", "sync_every": 8, "sync_schedule": schedule}
        few, options = Arrays(X[:GLOBAL_BATCH], Y[:GLOBAL_BATCH]), {"steps": 320, "steps_per_execution": 4}
        _, summary = trained(tanh_model, keras.optimizers.Adam(0.02), few, **local, **options)
        rounds.append(summary["averaging_rounds"])
    assert rounds[0] == 40
    assert rounds[1] > 50


COMBINATIONS = {
    "average": {"mode": "local", "sync_every": 5, "average_slots": "average"},
    "keep": {"mode": "local", "sync_every": 5},
    "nesterov": {"mode": "local", "sync_every": 5, "outer": "nesterov", "average_slots": "average"},
    "overlap": {"mode": "local", "sync_every": 4, "overlap": True},
    "overlap, nesterov, post-local": {
        "mode": "local",
        "sync_every": 4,
        "overlap": True,
        "outer": "nesterov",
        "sync_steps_first": 6,
    },
    "post-local, stopped in sync mode": {"mode": "local", "sync_every": 3, "sync_steps_first": 15},
    "adacomm": {"mode": "local", "sync_every": 2, "sync_schedule": "adacomm", "average_slots": "average"},
}


OFTEN = {"keep", "overlap, nesterov, post-local"}


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.long) for name in COMBINATIONS]
)
def test_stopped_and_resumed_equals_uninterrupted(name, folder, watch):
    local = COMBINATIONS[name]

    def adam():
        return keras.optimizers.Adam(0.01, use_ema=name == "keep")

    uninterrupted = make_run(adam, **local)
    end = results_of(uninterrupted, uninterrupted.fit())
    trainer = make_run(adam, folder, callbacks=[StopAt(watch, 11)], job_watch=watch, **local)
    # In the middle of a round, with a pending average.
    assert 10 <= stopped(trainer) < 16
    again = make_run(adam, folder, weights=7, **local)
    assert_same_results(results_of(again, again.fit()), end)


def test_a_checkpoint_of_another_mode_is_refused(folder):
    make_run(lambda: keras.optimizers.Adam(0.01), folder, steps=3, mode="local", sync_every=2).fit()
    with pytest.raises(JobError, match=r"local SGD: .* in the checkpoint, no here"):
        make_run(lambda: keras.optimizers.Adam(0.01), folder).fit()
    with pytest.raises(JobError, match=r"local SGD: .*'float32'.* in the checkpoint, .*'int4'.* here"):
        make_run(lambda: keras.optimizers.Adam(0.01), folder, mode="local", sync_every=2, sync_dtype="int4").fit()


@pytest.fixture
def slow_last_rank(monkeypatch, folder):
    """The last rank waits until rank 0 has made three times as many steps; returns the steps of each call.

    Steps are counted, not timed: on a shared machine, the speed of a rank varies.
    """
    run, steps_of_calls = TrainStep.run, []
    rank_0_steps = folder.with_name(f"{folder.name}, a byte for each step of rank 0")
    rank_0_steps.touch()
    patience_s = 5.0

    def run_slowly(self, steps):
        nonlocal patience_s
        deadline_s = time.monotonic() + patience_s
        while RANK == SIZE - 1 and rank_0_steps.stat().st_size < 3 * sum(steps_of_calls):
            if time.monotonic() > deadline_s:
                patience_s = 0.1  # Rank 0 has ended. Slow all the same: the others' end is noticed between two calls.
                break
            time.sleep(0.01)
        run(self, steps)
        steps_of_calls.append(steps)
        if RANK == 0:
            with rank_0_steps.open("ab") as file:
                file.write(bytes(steps))

    monkeypatch.setattr(TrainStep, "run", run_slowly)
    return steps_of_calls


def test_no_rank_waits_for_a_straggler(slow_last_rank):
    local = {"mode": "local", "sync_every": 4, "wait_free": True}
    model, summary = trained(tanh_model, keras.optimizers.SGD(0.05), steps=60, **local)
    steps = COLLECTIVES.allgather(sum(slow_last_rank))
    assert min(steps) == steps[-1]
    assert max(steps) > 2 * steps[-1]
    assert equal_on_all_ranks(values(model.weights))
    assert summary["steps"] == 60
    assert sum(steps) // SIZE >= 60
    # The summary counts all samples of each rank: full batches, and its smaller part of the last step of an epoch.
    plan = make_trainer(model, Arrays(X, Y), batch_size=GLOBAL_BATCH // SIZE, steps=1).plan
    assert summary["samples"] == sum(COLLECTIVES.allgather(plan.own_samples(0, sum(slow_last_rank))))


def test_a_wait_free_run_stops_and_resumes(folder, watch, slow_last_rank):
    local = {"mode": "local", "sync_every": 3, "wait_free": True}
    many_steps = 600  # so that ranks that are faster are not done before the stop

    def adam():
        return keras.optimizers.Adam(0.01)

    def state_of(trainer):
        return [v.numpy() for v in trainer.model.variables] + values(trainer.model.optimizer.variables)

    trainer = make_run(adam, folder, callbacks=[StopAt(watch, 2)], job_watch=watch, steps=many_steps, **local)
    step = stopped(trainer)
    assert step < many_steps
    again = make_run(adam, folder, weights=7, steps=step + 30, **local)
    compared = []

    def compare(restored):
        assert restored.step == step
        assert all(np.array_equal(a, b) for a, b in zip(state_of(trainer), state_of(again), strict=True))
        assert again.parts.train_step.steps_made == trainer.parts.train_step.steps_made
        compared.append(restored)

    assert again.fit(on_start=compare)["steps"] == step + 30
    assert compared
    assert equal_on_all_ranks(values(again.model.weights))


def test_a_stop_ends_a_wait_free_round_at_once(folder, watch):
    local = {"mode": "local", "sync_every": 1_000_000, "wait_free": True}
    trainer = make_run(lambda: keras.optimizers.SGD(0.01), folder, job_watch=watch, steps=10_000_000, **local)
    if RANK == SIZE - 1:
        threading.Timer(2.0, lambda: watch.request_stop("a test")).start()
    stopped(trainer)
    assert trainer.parts.train_step.steps_made < 1_000_000


def test_a_rank_that_skips_steps_delays_no_other():
    x = X.copy()
    x[3] = np.nan
    _, summary = trained(
        tanh_model, keras.optimizers.SGD(0.05), Arrays(x, Y), mode="local", sync_every=4, on_nan="skip", guard_every=1
    )
    assert np.isfinite(summary["loss"])


@pytest.mark.parametrize(
    ("synchronized", "options", "message"),
    [
        (False, {"gradient_accumulation_steps": 2}, "mode='local' excludes gradient_accumulation_steps"),
        (False, {"sync_batchnorm": True}, "mode='local' excludes sync_batchnorm=True"),
        (True, {}, "mode='local' excludes BatchNormalization over all ranks"),
    ],
)
def test_what_local_sgd_excludes(synchronized, options, message):
    def make_model() -> keras.Model:
        normalization = layers.BatchNormalization(synchronized=synchronized)
        return keras.Sequential([layers.Input((6,)), normalization, layers.Dense(NUM_CLASSES)])

    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=options.get("gradient_accumulation_steps"))
    model = compiled(make_model, optimizer)
    with pytest.raises(UsageError, match=message):
        make_trainer(model, Arrays(X, Y), batch_size=8, steps=3, mode="local", **options)


def test_skipped_steps_are_counted_over_all_ranks_also_after_resuming(folder, watch):
    x = X.copy()
    order = np.random.Generator(np.random.Philox([5, 0])).permutation(len(X))
    x[order[3 * GLOBAL_BATCH - 1]] = np.nan  # in the first epoch: step 3, the last rank
    warnings = Warnings()
    options = {"mode": "local", "sync_every": 4, "on_nan": "skip", "guard_every": 1, "reporter": warnings}
    options["source"] = Arrays(x, Y)
    adam = lambda: keras.optimizers.Adam(0.01)
    assert 3 < stopped(make_run(adam, folder, callbacks=[StopAt(watch, 4)], job_watch=watch, **options)) < 8
    summary = make_run(adam, folder, weights=7, **options).fit()
    assert COLLECTIVES.allgather(summary["skipped_steps"]) == [3] * SIZE  # one in each epoch
    numbers = [text.partition(" ")[0] for _, text in warnings.received]
    assert numbers == ["1", "2", "3"]
