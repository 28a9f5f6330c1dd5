"""On all ranks: local SGD in elastic jobs, when members are lost, leave or join."""

from collections import defaultdict
from collections.abc import Callable

import keras
import numpy as np
import pytest
from models import relative_difference, values
from trainers import train_config
from trainings import (
    COLLECTIVES,
    GLOBAL_BATCH,
    RANK,
    SIZE,
    STEPS,
    X,
    Y,
    batchnorm_model,
    compiled,
    equal_on_all_ranks,
    tanh_model,
)

from hvdtrain.data import Arrays
from hvdtrain.fault_tolerance.job_watch import JobWatch
from hvdtrain.local_sgd.facts import SAMPLES
from hvdtrain.local_sgd.fragment import Fragment
from hvdtrain.training.step_runner import StepRunner
from hvdtrain.training.strategies.strategy import Place


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
