"""On all ranks: local SGD in the trainer."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable

import keras
import numpy as np
import pytest
from keras import layers
from models import NUM_CLASSES, relative_difference, values
from noted_findings import noted_findings
from stopped_runs import StopAt, assert_same_results, make_run, results_of, stopped
from trainers import make_trainer, train_config
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
from hvdtrain.fault_tolerance.job_watch import JobWatch
from hvdtrain.local_sgd import fragment as fragment_module
from hvdtrain.local_sgd.facts import SAMPLES
from hvdtrain.local_sgd.fragment import Fragment
from hvdtrain.system.background import BackgroundTask, ImmediateTask
from hvdtrain.training.equality import scheduled_check
from hvdtrain.training.step_runner import StepRunner
from hvdtrain.training.strategies.strategy import Place
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


class Member:
    """A rank of an elastic job in local mode, with an average every 4 steps."""

    def __init__(self, steps: int = 0, make_model=tanh_model, **options):
        self.model = compiled(make_model, keras.optimizers.SGD(0.1, momentum=0.9))
        options = {"mode": "local", "sync_every": 4, **options}
        config = train_config(batch_size=GLOBAL_BATCH // SIZE, steps=STEPS, seed=5, **options)
        runner = StepRunner(self.model, Arrays(X, Y), config, collectives=COLLECTIVES, job_watch=JobWatch(COLLECTIVES))
        runner.start()
        self.parts = runner.parts
        self.train(steps)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.parts.strategy.run(1)

    def settle(self, *, has_state: bool = True, num_lost: int = 1) -> None:
        """What an elastic job does with its members when they have changed."""
        self.parts.strategy.settle()
        rounds, steps_in_round = self.parts.strategy.position
        own = Place(has_state, self.parts.train_step.steps_made, True, True, rounds, steps_in_round)
        places = COLLECTIVES.allgather(own)
        self.parts.strategy.take_over(places, places.index(max(places)), num_lost)

    def assert_equals(self, other: "Member") -> None:
        assert self.parts.train_step.steps_made == other.parts.train_step.steps_made
        assert self.parts.strategy.position == other.parts.strategy.position
        ours, theirs = values(self.model.weights), values(other.model.weights)
        assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


def failing(monkeypatch, *, fails: bool, after: int = 0) -> None:
    """On some ranks, the allreduce of an average is completed by the others only."""
    reduce, made = COLLECTIVES.sum_tensors, []

    def reduce_and_fail(*arguments):
        totals = reduce(*arguments)
        made.append(totals)
        if fails and len(made) > after:
            raise RuntimeError("Horovod")
        return totals

    monkeypatch.setattr(COLLECTIVES, "sum_tensors", reduce_and_fail)


def test_a_member_catches_up_on_its_own_samples():
    member = Member(steps=1 if RANK else 3)
    member.settle()
    member.assert_equals(Member(steps=3))
    assert member.parts.strategy.summary()["lost_steps"] == 3


def test_a_member_that_missed_an_average_takes_it_over(monkeypatch):
    with monkeypatch.context() as patch:
        failing(patch, fails=RANK == 0)
        member = Member(steps=3)
        if RANK == 0:
            with pytest.raises(RuntimeError):
                member.train(1)
        else:
            member.train(3)
    member.settle()
    member.assert_equals(Member(steps=6))
    assert member.parts.strategy.summary()["lost_steps"] == 2


def test_an_average_that_no_member_received_is_repeated(monkeypatch):
    with monkeypatch.context() as patch:
        failing(patch, fails=True)
        member = Member(steps=3)
        with pytest.raises(RuntimeError):
            member.train(1)
    member.settle()
    member.assert_equals(Member(steps=4))
    assert member.parts.strategy.summary()["lost_steps"] == 4


LATE = {"overlap": True, "fragment_delay": 2}


@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_a_member_that_missed_an_average_in_the_background_takes_it_over(monkeypatch, alpha):
    """It is sent at step 4 and merged at step 6; then others make one more step."""
    options = {**LATE, "merge_alpha": alpha}
    with monkeypatch.context() as patch:
        failing(patch, fails=RANK == 0)
        member = Member(steps=5, **options)
        if RANK == 0:
            with pytest.raises(RuntimeError):
                member.train(1)
        else:
            member.train(2)
    member.settle()
    member.assert_equals(Member(steps=7, **options))
    assert member.parts.strategy.summary()["lost_steps"] == 3


def test_an_average_in_the_background_that_no_member_received_is_repeated(monkeypatch):
    """Each step counts once: as if the average had been due only now."""
    with monkeypatch.context() as patch:
        failing(patch, fails=True)
        member = Member(steps=5, **LATE)
        with pytest.raises(RuntimeError):
            member.train(1)
    member.settle()
    member.assert_equals(Member(steps=6, sync_every=6))
    assert member.parts.strategy.summary()["lost_steps"] == 6


def test_a_member_without_the_average_may_be_further(monkeypatch):
    """Another rank has received it, and merges what it has not merged yet."""
    with monkeypatch.context() as patch:
        failing(patch, fails=RANK == 0)
        member = Member(steps=7 if RANK == 0 else 5, overlap=True, fragment_delay=4)
        member.settle()
    strategy = member.parts.strategy
    assert (member.parts.train_step.steps_made, strategy.position) == (7, (1, 3))
    assert strategy.summary()["lost_steps"] == 3
    member.train(1)
    strategy.end_round()
    with strategy.synchronized():
        assert equal_on_all_ranks(values(member.model.weights))
    assert strategy.state()["total_samples"] == sum(COLLECTIVES.allgather(member.parts.feed.plan.own_samples(0, 8)))


def assert_each_step_has_counted_once(member: Member) -> None:
    member.parts.strategy.finish()
    assert equal_on_all_ranks(values(member.model.weights))
    made = member.parts.feed.plan.own_samples(0, member.parts.train_step.steps_made)
    assert member.parts.strategy.state()["total_samples"] == sum(COLLECTIVES.allgather(made))


def test_a_member_that_waits_for_no_other_takes_over_what_it_missed(monkeypatch):
    with monkeypatch.context() as patch:
        failing(patch, fails=RANK == 0)
        member = Member(steps=1, wait_free=True)
        if RANK == 0:
            member.parts.train_step.run(1)
            member.parts.strategy.average_if_due(1)
        COLLECTIVES.barrier()
        steps = member.parts.train_step.steps_made
        member.settle()
    assert member.parts.train_step.steps_made == steps
    assert member.parts.strategy.position[0] == 1
    averaged = member.parts.strategy.state()["total_steps"]
    member.train(2)
    # The step of the rank that was furthest, and those of all since.
    since = member.parts.strategy.state()["total_steps"] - averaged
    assert member.parts.progress.step == max(COLLECTIVES.allgather(steps)) + since // SIZE
    assert_each_step_has_counted_once(member)


def test_a_round_without_waiting_that_could_not_end_goes_on(monkeypatch):
    member = Member(wait_free=True)
    with monkeypatch.context() as patch:
        failing(patch, fails=True)
        with pytest.raises(RuntimeError):
            member.train(2)
    member.settle()
    assert member.parts.strategy.position[0] == 0
    member.train(2)
    assert_each_step_has_counted_once(member)


FRAGMENTS = {"overlap": True, "fragments": 2, "fragment_delay": 2}
"""One of two layers is sent after every second step, and merged two steps later."""


@pytest.fixture
def averaged_samples(monkeypatch) -> Callable[[], list[int]]:
    """Returns the samples of all ranks that are part of each fragment's anchor."""
    merge, found = Fragment.merge, defaultdict(int)

    def merge_and_count(self):
        facts = merge(self)
        found[self._name] += round(facts[SAMPLES])
        return facts

    monkeypatch.setattr(Fragment, "merge", merge_and_count)
    # A rank that has missed an average has not counted it.
    return lambda: np.max(COLLECTIVES.allgather([found[name] for name in sorted(found)]), axis=0).tolist()


def samples_of_all(member: Member, first: int = 0) -> int:
    steps = member.parts.train_step.steps_made - first
    return sum(COLLECTIVES.allgather(member.parts.feed.plan.own_samples(first, steps)))


@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_a_member_that_missed_the_average_of_a_fragment_takes_it_over(alpha, averaged_samples, monkeypatch):
    """The first layer is sent at step 2 and received by all, the second one at step 4 and by some; none is merged."""
    options = {**FRAGMENTS, "fragment_delay": 3, "merge_alpha": alpha}
    with monkeypatch.context() as patch:
        failing(patch, fails=RANK == 0, after=1)
        member = Member(steps=4, **options)
        member.parts.strategy.settle()
    assert COLLECTIVES.allgather(member.parts.strategy.position) == [(1, 4), *[(2, 2)] * (SIZE - 1)]
    member.settle()
    member.train(7)
    member.parts.strategy.finish()
    assert averaged_samples() == [samples_of_all(member)] * 2
    expected = Member(steps=4, **options)
    expected.settle()
    expected.train(7)
    expected.parts.strategy.finish()
    member.assert_equals(expected)
    assert equal_on_all_ranks(values(member.model.weights))


@pytest.mark.parametrize("received", [0, 1, 2])
def test_averages_of_fragments_that_no_member_received_are_repeated(received, averaged_samples, monkeypatch):
    """Of the two that are on their way after step 4."""
    with monkeypatch.context() as patch:
        failing(patch, fails=True, after=received)
        member = Member(steps=4, **{**FRAGMENTS, "fragment_delay": 4})
        member.parts.strategy.settle()
    strategy = member.parts.strategy
    assert strategy.position == (received, 4 if received < 2 else 2)
    member.settle()
    # The first one that is overdue is sent at once; a second one two steps later.
    assert strategy.position == [(1, 4), (2, 2), (2, 2)][received]
    member.train(3)
    strategy.finish()
    assert averaged_samples() == [samples_of_all(member)] * 2
    assert equal_on_all_ranks(values(member.model.weights))


@pytest.mark.parametrize("steps", [3, 5])
@pytest.mark.parametrize("options", [FRAGMENTS, {"fragments": 2}], ids=["in the background", "waiting"])
def test_a_newcomer_starts_at_the_last_average_of_each_fragment(options, steps, averaged_samples):
    member = Member(steps=steps, **options)
    if RANK == 0:
        member.parts.strategy._averager._schedule.next = 0  # as in a process that has just started
    member.settle(has_state=RANK > 0, num_lost=0)
    strategy = member.parts.strategy
    assert strategy.position == (steps // 2, 3)
    member.parts.restart_with(member.parts.feed.plan)
    member.train(4)
    assert strategy.position == (steps // 2 + (1 if "overlap" in options else 2), 3)
    with strategy.synchronized():
        assert equal_on_all_ranks(values(member.model.weights))
    strategy.finish()
    assert equal_on_all_ranks(values(member.model.weights))
    # The first layer was averaged after step 2, the second one after step 4, if at all: later steps of rank 0 are lost.
    averaged = (2, 4 if steps == 5 else 0)
    lost = [member.parts.feed.plan.own_samples(first, steps - first) for first in averaged]
    assert averaged_samples() == [samples_of_all(member) - COLLECTIVES.allgather(each)[0] for each in lost]


def test_members_that_leave_lose_no_step_of_any_fragment(averaged_samples):
    member = Member(steps=5, **FRAGMENTS)
    member.parts.strategy.end_round()
    assert member.parts.strategy.position == (4, 0)
    assert equal_on_all_ranks(values(member.model.weights))
    assert averaged_samples() == [samples_of_all(member)] * 2


@pytest.mark.parametrize("all_fail", [False, True])
def test_fragments_without_waiting_survive_a_lost_average(all_fail, averaged_samples, monkeypatch):
    """The average of the second layer fails on some ranks, or on all."""
    with monkeypatch.context() as patch:
        failing(patch, fails=all_fail or RANK == 0, after=1)
        member = Member(steps=1, wait_free=True, fragments=2)
        member.parts.strategy.settle()
    member.settle()
    assert member.parts.strategy.position[0] == (1 if all_fail else 2)
    member.train(2)
    member.parts.strategy.finish()
    assert averaged_samples() == [samples_of_all(member)] * 2
    assert equal_on_all_ranks(values(member.model.weights))


def test_a_newcomer_and_ranks_that_do_not_wait_average_before_the_next_change():
    """The others have made steps of their own in the round, the newcomer none: all take part."""
    member = Member(wait_free=True)
    if RANK > 0:
        member.parts.train_step.run(1)
        member.parts.strategy.average_if_due(1)
    COLLECTIVES.barrier()
    member.settle(has_state=RANK > 0)
    member.parts.strategy.end_round()
    assert member.parts.strategy.position == (1, 0)
    assert equal_on_all_ranks(values(member.model.weights))


def test_a_view_of_the_averaged_model_that_fails_leaves_the_weights_of_a_rank(monkeypatch):
    member = Member(steps=2, make_model=batchnorm_model)
    before = values(member.model.weights)
    with monkeypatch.context() as patch:
        failing(patch, fails=True, after=1)  # The first of two tensors is assigned already.
        with pytest.raises(RuntimeError), member.parts.strategy.synchronized():
            pass
    assert all(np.array_equal(a, b) for a, b in zip(values(member.model.weights), before, strict=True))


def test_a_newcomer_starts_at_the_last_average():
    member = Member(steps=4)
    average = values(member.model.weights)
    if RANK == 0:
        member.train(1)
        member.model.set_weights([weight + 1 for weight in average])
        member.model.optimizer.iterations.assign(0)
    else:
        member.train(2)
    member.settle(has_state=RANK > 0, num_lost=0)
    if RANK == 0:
        assert all(np.array_equal(a, b) for a, b in zip(values(member.model.weights), average, strict=True))
    assert member.parts.train_step.steps_made == member.model.optimizer.iterations == 6
    member.parts.restart_with(member.parts.feed.plan)
    assert member.parts.strategy.position == (1, 2)
    member.train(1)
    member.parts.train_step.run(1)
    steps = 2 if RANK == 0 else 4
    samples = member.parts.feed.plan.own_samples(8 - steps, steps)
    moved = [(now - start) * samples for now, start in zip(values(member.model.weights), average, strict=True)]
    *totals, num_samples = COLLECTIVES.sum([*moved, np.array(float(samples))])
    assert member.parts.strategy.average_if_due(1)
    expected = [start + total / num_samples for start, total in zip(average, totals, strict=True)]
    assert relative_difference(values(member.model.weights), expected) < 1e-5
    assert equal_on_all_ranks(values(member.model.weights))
