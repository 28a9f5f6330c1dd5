"""The sampling plan: the global order and its slices, without TensorFlow."""

import numpy as np
import pytest

from hvdtrain.data.sample_plan import SamplePlan, exclude, shard, shard_batches
from hvdtrain.errors import UsageError


def drawn(epoch: int, **options) -> list[list[int]]:
    """The sample numbers of each global batch, in step order, over all ranks."""
    plans = [SamplePlan(rank=rank, **options) for rank in range(options["size"])]
    order = plans[0].order(epoch)
    steps = []
    for step in range(plans[0].steps_per_epoch):
        slices = [plan.slices(step) for plan in plans]
        parts = [slices[rank][k] for k in range(plans[0].gradient_accumulation_steps) for rank in range(len(plans))]
        steps.append([int(n) for part in parts if part.weight for n in order[part.start : part.start + part.count]])
    return steps


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("num_samples", [4, 7, 64, 1000])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_each_sample_once_per_epoch(size, num_samples, accumulate):
    options = {"num_samples": num_samples, "batch_size": 5, "size": size}
    options["gradient_accumulation_steps"] = accumulate
    for epoch in range(2):
        everything = [n for step in drawn(epoch, **options) for n in step]
        assert sorted(everything) == list(range(num_samples))


def test_order_does_not_depend_on_the_number_of_ranks():
    """The same global batch of 24 on 1, 2, 3 and 4 ranks, and in micro-batches."""
    layouts = [(24, 1, 1), (12, 2, 1), (8, 3, 1), (6, 4, 1), (6, 2, 2), (3, 4, 2)]
    results = [
        drawn(3, num_samples=250, batch_size=batch, size=size, gradient_accumulation_steps=accumulate)
        for batch, size, accumulate in layouts
    ]
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("first_sample", [1, 23, 24, 97, 100, 250, 1000])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_plan_that_begins_within_an_epoch_takes_the_rest_of_it_and_then_whole_ones(first_sample, accumulate):
    options = {"num_samples": 100, "batch_size": 4, "size": 3, "gradient_accumulation_steps": accumulate}
    plans = [SamplePlan(rank=rank, first_step=50, first_sample=first_sample, **options) for rank in range(3)]
    plan, first_epoch = plans[0], first_sample // 100
    trained: dict[int, list[int]] = {}
    last = plan.first_step_of(first_epoch + 3)
    for step in range(50, last):
        epoch, index, sample = plan.position(step)
        assert plan.first_step_of(epoch) == step - index or epoch == first_epoch
        order = plan.order(epoch).tolist()
        numbers = []
        for part in range(accumulate):
            for each in plans:
                drawn_numbers, weight = each.draw(step * accumulate + part)
                numbers += drawn_numbers.tolist() if weight else []
        assert numbers == order[sample : sample + len(numbers)]
        assert len(numbers) == plan.global_batch_size or sample + len(numbers) == 100
        trained.setdefault(epoch, []).extend(numbers)
    assert plan.position(last) == (first_epoch + 3, 0, 0)
    assert trained.pop(first_epoch) == plan.order(first_epoch).tolist()[first_sample % 100 :]
    assert sorted(trained) == [first_epoch + 1, first_epoch + 2]
    assert all(numbers == plan.order(epoch).tolist() for epoch, numbers in trained.items())


def test_order_depends_on_seed_and_epoch():
    seeds_and_epochs = ((0, 0), (0, 1), (1, 0))
    orders = [SamplePlan(num_samples=100, batch_size=10, seed=s).order(e).tolist() for s, e in seeds_and_epochs]
    assert orders[0] != orders[1]
    assert orders[0] != orders[2]
    assert orders[0] == SamplePlan(num_samples=100, batch_size=10).order(0).tolist()
    assert SamplePlan(num_samples=5, batch_size=1, shuffle=False).order(9).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("num_samples", [4, 9, 13, 16, 17])
def test_mean_over_ranks_equals_mean_over_samples(num_samples):
    values = np.random.default_rng(0).normal(size=num_samples)
    plans = [SamplePlan(num_samples=num_samples, batch_size=2, rank=rank, size=4) for rank in range(4)]
    order = plans[0].order(0)
    for step in range(plans[0].steps_per_epoch):
        losses = []
        for plan in plans:
            (part,) = plan.slices(step)
            losses.append(part.weight * np.mean(values[order[part.start : part.start + part.count]]))
        expected = np.mean(values[order[step * 8 : (step + 1) * 8]])
        assert np.mean(losses) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("num_samples", [4, 8, 9, 12, 16, 18, 20, 24])
@pytest.mark.parametrize("remainder", ["pad", "drop"])
def test_is_even_and_has_fillers(num_samples, remainder):
    if remainder == "drop" and num_samples < 16:
        return
    plans = [
        SamplePlan(
            num_samples=num_samples, batch_size=2, rank=rank, size=4, gradient_accumulation_steps=2, remainder=remainder
        )
        for rank in range(4)
    ]
    weights = {weight for plan in plans for weight in plan.epoch_slices()[2]}
    for plan in plans:
        assert plan.is_even == (weights == {1.0})
        assert plan.has_fillers == (0.0 in weights)


def test_numbers_count_micro_batches_across_epochs():
    plan = SamplePlan(num_samples=11, batch_size=2, rank=1, size=2, gradient_accumulation_steps=2)
    starts, counts, _ = plan.epoch_slices()
    expected = [
        plan.order(epoch)[start : start + count].tolist()
        for epoch in range(2)
        for start, count in zip(starts, counts, strict=True)
    ]
    assert len(expected) == 8
    assert [plan.numbers(i).tolist() for i in range(8)] == expected


@pytest.mark.parametrize("excluded", [frozenset(), frozenset({0, 1, 2}), frozenset(range(1, 23)), frozenset({7, 40})])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_single_micro_batch_is_drawn_as_all_of_an_epoch_are(excluded, accumulate):
    for rank in range(3):
        options = {"num_samples": 23, "batch_size": 2, "rank": rank, "size": 3, "seed": 5}
        plan = SamplePlan(**options, gradient_accumulation_steps=accumulate)
        for epoch in range(2):
            # Also the first ones of this order, of which the filler would be one.
            excluded = excluded or frozenset(plan.order(epoch)[:6].tolist())
            order, starts, counts, weights = exclude(excluded, plan.order(epoch), *plan.epoch_slices())
            for i, (start, count, weight) in enumerate(zip(starts, counts, weights, strict=True)):
                numbers, factor = plan.draw(epoch * len(starts) + i, excluded)
                assert (numbers.tolist(), factor) == (order[start : start + count].tolist(), pytest.approx(weight))


def test_exclude():
    order = np.array([3, 1, 4, 0, 2, 5])
    starts, counts, weights = np.array([0, 2, 4]), np.array([2, 2, 2]), np.array([1.0, 1.0, 0.5])
    left = exclude(frozenset({3, 2, 5}), order, starts, counts, weights)
    assert [each.tolist() for each in left] == [[1, 4, 0], [0, 1, 0], [1, 2, 1], [0.5, 1.0, 0.0]]


def test_epoch_seeds_differ():
    seeds = {
        int(SamplePlan(num_samples=9, batch_size=1, seed=seed).epoch_seed(epoch))
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(seeds) == 25


def test_drop_drops_the_remainder():
    steps = drawn(0, num_samples=30, batch_size=4, size=2, remainder="drop")
    assert [len(step) for step in steps] == [8, 8, 8]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_samples": 3, "batch_size": 1, "size": 4}, "3 samples for 4 ranks"),
        ({"num_samples": 3, "batch_size": 8, "remainder": "drop"}, "leaves no step"),
        ({"num_samples": 3, "batch_size": 0}, "batch_size must be at least 1"),
        ({"num_samples": 3, "batch_size": 1, "remainder": "wrap"}, "remainder must be one of pad, drop"),
    ],
)
def test_invalid_plans_are_rejected(options, message):
    with pytest.raises(UsageError, match=message):
        SamplePlan(**options)


def test_shards_cover_each_sample_once():
    assert [n for rank in range(3) for n in shard(10, rank, 3)] == list(range(10))


def test_shard_batches():
    assert [batch.tolist() for batch in shard_batches(10, 2, 1, 2)] == [[5, 6], [7, 8], [9]]
    assert [batch.tolist() for batch in shard_batches(10, 2, 1, 2, frozenset({0, 6, 7, 8}))] == [[5], [9]]
