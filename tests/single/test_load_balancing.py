"""Load balancing: how a batch is split over ranks, when the split changes, and that the input follows."""

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trainers import make_trainer, train_config

import hvdtrain
from hvdtrain.data import Arrays
from hvdtrain.data.bad_samples import BadSampleQuota
from hvdtrain.data.feeds import TrainingFeed
from hvdtrain.data.sample_plan import SamplePlan, split_batch
from hvdtrain.distributed.single_process import SingleProcessCollectives
from hvdtrain.errors import UsageError
from hvdtrain.training.config import BalanceConfig
from hvdtrain.training.load_balancing import LoadBalancer, Measured, rebalanced
from hvdtrain.training.step_times import StepTimes, TimeShares

hvdtrain.init()


@settings(deadline=None)  # of the time of an example, on a busy machine
@given(
    weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=9),
    per_rank=st.integers(1, 64),
    headroom=st.integers(0, 64),
)
def test_a_batch_is_split_in_proportion_and_within_limits(weights, per_rank, headroom):
    samples, most = per_rank * len(weights), per_rank + headroom
    sizes = split_batch(samples, weights, most)
    assert sum(sizes) == samples
    assert all(1 <= each <= most for each in sizes)
    wanted = np.array(weights) * samples / sum(weights)
    if wanted.min() >= 1 and wanted.max() <= most:
        assert np.abs(np.array(sizes) - wanted).max() < len(weights)


def test_fixed_shares():
    assert split_batch(28, [2, 2, 2, 1], 28) == (8, 8, 8, 4)
    assert split_batch(8, [1, 0], 8) == (8, 0)
    with pytest.raises(UsageError, match=r"from 1 to 3 samples of a micro-batch\. Received: 8 samples for 2 ranks"):
        split_batch(8, [1, 1], 3)


class GivenTimes(TimeShares):
    """Step times that a test sets."""

    def __init__(self):
        super().__init__(StepTimes(1), SingleProcessCollectives(), "a")

    def exchange(self) -> None:
        pass


def balancer(size: int, *, ranks_may_change: bool, times: TimeShares | None = None, **options) -> LoadBalancer:
    sizes = split_batch(48, [1] * size, 48)
    plan = SamplePlan(num_samples=100, batch_size=16, size=size, rank_batch_sizes=sizes)
    feed = TrainingFeed(Arrays(np.zeros((100, 1))), plan, BadSampleQuota(0, SingleProcessCollectives()))
    return LoadBalancer(BalanceConfig(**options), feed, times or GivenTimes(), ranks_may_change=ranks_may_change)


def test_shares_hold_until_the_ranks_change(capfd):
    made = balancer(3, ranks_may_change=True, shares="2,1,1")
    assert made.rank_batch_sizes == (24, 12, 12)
    made.restart(0)
    made.restart(0)
    assert capfd.readouterr().err.count("shares was for the ranks before") == 1
    # A newcomer is alone until it joins.
    assert balancer(1, ranks_may_change=True, shares="2,1,1").rank_batch_sizes == (48,)
    with pytest.raises(UsageError, match=r"shares must have a number for each rank\. .* for 2 rank"):
        balancer(2, ranks_may_change=True, shares="2,1,1")


@pytest.mark.parametrize("options", [{}, {"max_batch_size": 20}])
def test_fewer_ranks_than_the_limit_needs_share_the_batch_all_the_same(options):
    times = GivenTimes()
    made = balancer(2, ranks_may_change=True, times=times, balance=True, **options)
    times.all_steps = [np.full((2, 5, 3), [[[0.0, 1.0, 0.0]], [[0.0, 2.0, 0.0]]])]
    made.rebalance()
    assert made.rank_batch_sizes == ((24, 24) if options else (32, 16))


def seconds_of(sizes, per_sample, overhead) -> list[float]:
    return [o + c * n for n, c, o in zip(sizes, per_sample, overhead, strict=True)]


@settings(deadline=None)  # of the time of an example, on a busy machine
@given(
    per_sample=st.lists(st.floats(0.5, 4), min_size=2, max_size=6),
    overhead=st.floats(0, 40),
    batch_size=st.integers(8, 64),
)
def test_repeated_decisions_settle_and_never_make_the_slowest_rank_slower(per_sample, overhead, batch_size):
    sizes = (batch_size,) * len(per_sample)
    slowest = max(seconds_of(sizes, per_sample, [overhead] * len(sizes)))
    earlier = None
    for _ in range(30):
        seconds = seconds_of(sizes, per_sample, [overhead] * len(sizes))
        assert max(seconds) <= slowest * (1 + 1e-9)
        slowest, before = max(seconds), sizes
        now = Measured(sizes, tuple(seconds))
        sizes = rebalanced(now, 2 * batch_size, earlier)
        earlier = now if sizes != now.sizes else earlier
    assert sizes == before


def test_time_that_does_not_depend_on_samples_does_not_move_them_all():
    """Rank 1 needs 5 ms more in each step, and as long as rank 0 for a sample: only its samples could be moved."""
    sizes, earlier = (16, 16), None
    for _ in range(12):
        now = Measured(sizes, tuple(seconds_of(sizes, [5e-5, 5e-5], [0.010, 0.015])))
        sizes = rebalanced(now, 32, earlier)
        earlier = now if sizes != now.sizes else earlier
    assert min(sizes) >= 12


def test_a_rank_of_half_the_speed_gets_half_the_samples():
    sizes = rebalanced(Measured((28, 28, 28, 28), (1.0, 1.0, 2.0, 1.0)), 56)
    assert sizes == (32, 32, 16, 32)
    # When it has recovered, it gets them back.
    assert rebalanced(Measured(sizes, (32, 32, 16, 32)), 56) == (28, 28, 28, 28)


@pytest.mark.parametrize("changed_at", [32, 33, 39, 40, 41, 47])
def test_a_changed_speed_is_followed_within_two_intervals(changed_at):
    """Whenever in an interval it changes."""
    every, before, after = 16, (1.0, 0.5, 0.5), (0.5, 1.0, 0.25)
    times = GivenTimes()
    made = balancer(3, ranks_may_change=False, times=times, balance=True, balance_every=every)
    window = []
    for step in range(changed_at + 2 * every):
        if step == changed_at:
            assert made.rank_batch_sizes == (10, 19, 19)
        seconds = seconds_of(made.rank_batch_sizes, before if step < changed_at else after, [0.0] * 3)
        window.append([[0.0, each, 0.0] for each in seconds])
        if len(window) == every:
            times.all_steps.append(np.array(window).swapaxes(0, 1))
            window.clear()
            made.rebalance()
    assert made.rank_batch_sizes == (14, 7, 27)


def test_noise_changes_nothing():
    generator = np.random.default_rng(0)
    for _ in range(200):
        seconds = 1 + generator.uniform(-0.02, 0.02, size=4)
        assert rebalanced(Measured((32, 32, 32, 32), tuple(seconds)), 64) == (32, 32, 32, 32)


def test_the_feed_follows_without_another_iterator():
    numbers = np.arange(40)
    plan = SamplePlan(num_samples=40, batch_size=4, rank=1, size=2)
    feed = TrainingFeed(Arrays(numbers, numbers), plan, BadSampleQuota(0, SingleProcessCollectives()))
    feed.start(0)
    iterator, order = feed.iterator, plan.order(0)
    next(iterator)
    feed.set_rank_batch_sizes((2, 6))
    feed.start(1)
    assert feed.iterator is iterator
    (x, _), weight = next(iterator)
    assert (x.numpy().tolist(), float(weight)) == (order[10:16].tolist(), 1.5)
    feed.set_rank_batch_sizes((8, 0))
    feed.start(2)
    (x, _), weight = next(iterator)
    assert (len(x), float(weight)) == (1, 0.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"balance": True, "shares": "1,1"}, "shares excludes balance=True"),
        ({"shares": "1,x"}, "shares must be whole numbers"),
        ({"shares": "0,0"}, "shares must be whole numbers"),
        ({"balance_every": 10}, "balance_every needs balance=True"),
        ({"balance": True, "balance_every": 1000}, "balance_every must be from 1 to 512"),
        ({"balance": True, "mode": "local"}, "mode='local' excludes balance=True"),
        ({"shares": "1", "mode": "local"}, "mode='local' excludes shares"),
        ({"balance": True, "jit_compile": True}, "XLA compiles each of them again"),
    ],
)
def test_options_that_cannot_work_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        train_config(**options)


def test_shares_must_fit_the_number_of_ranks():
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    data = Arrays(np.zeros((8, 2), np.float32), np.zeros((8, 1), np.float32))
    with pytest.raises(UsageError, match=r"shares must have a number for each rank\. Received: 1,1 for 1 rank"):
        make_trainer(model, data, steps=1, shares="1,1")
