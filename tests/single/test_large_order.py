"""Orders that are computed where they are read: permutations, and the training data of plans that use them."""

import numpy as np
import pytest

from hvdtrain.data import sample_plan
from hvdtrain.data.arrays import Arrays
from hvdtrain.data.large_order import LargeOrder
from hvdtrain.data.pipeline import training_dataset
from hvdtrain.data.sample_plan import SamplePlan

BILLION = 10**9
FIRST_FOUR = [871051356, 687811677, 846409743, 142919262]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 1000, 4097, 1 << 16])
def test_each_number_is_there_once(size):
    order = LargeOrder(size, (3, 7))
    assert len(order) == size
    assert sorted(order[:].tolist()) == list(range(size))


def test_any_part_can_be_read():
    order = LargeOrder(BILLION, (0, 1))
    part = order[BILLION - 64 :]
    assert part.dtype == np.int64
    assert ((part >= 0) & (part < BILLION)).all()
    assert order[np.array([BILLION - 1, BILLION - 64])].tolist() == [part[-1], part[0]]
    assert order[BILLION - 64 : BILLION - 32].tolist() == part[:32].tolist()


def test_an_order_never_changes():
    """Checkpoints hold positions in it."""
    assert LargeOrder(BILLION, (0, 0))[:4].tolist() == FIRST_FOUR
    assert LargeOrder(BILLION, None)[:4].tolist() == [0, 1, 2, 3]


def chi_square(counts: np.ndarray) -> float:
    expected = counts.sum() / counts.size
    return float((((counts - expected) ** 2) / expected).sum())


@pytest.mark.parametrize("other", [(0, 1), (1, 0)])
def test_orders_look_random(other):
    """Chi-square tests with 255 degrees of freedom; for 1 in 10,000 random orders it is above 350."""
    size = 200_000
    order = LargeOrder(size, (0, 0))[:]
    cells = order * 16 // size
    for of_pair in (cells[:-1] * 16 + cells[1:], cells * 16 + LargeOrder(size, other)[:] * 16 // size):
        assert chi_square(np.bincount(of_pair, minlength=256)) < 350
    displacements = (order - np.arange(size)) % size
    assert chi_square(np.bincount(displacements * 256 // size, minlength=256)) < 350
    assert (np.diff(order) == 1).sum() < 10


@pytest.fixture
def few_in_memory(monkeypatch) -> None:
    monkeypatch.setattr(sample_plan, "MAX_IN_MEMORY", 10)


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_sample_once_on_any_number_of_ranks(few_in_memory, shuffle):
    """The samples of each step are the same on 1, 2 and 4 ranks, from any step on."""
    x = np.arange(53)
    steps = {}
    for size in (1, 2, 4):
        options = {"num_samples": 53, "batch_size": 8 // size, "size": size, "shuffle": shuffle}
        plans = [SamplePlan(rank=rank, **options) for rank in range(size)]
        assert plans[0].computes_order
        feeds = [iter(training_dataset(Arrays(x, x), plan, first_micro_batch=3)) for plan in plans]
        steps[size] = []
        for _ in range(2 * plans[0].steps_per_epoch - 3):
            parts = [next(feed) for feed in feeds]
            steps[size].append([int(n) for (part, _), weight in parts for n in part if weight])
    assert steps[1] == steps[2] == steps[4]
    assert sorted(n for step in steps[1][-7:] for n in step) == list(range(53))


def test_an_unreadable_sample_is_skipped(few_in_memory):
    plan = SamplePlan(num_samples=20, batch_size=4)
    order = plan.order(0)[:].tolist()
    bad = order[5]
    (_, first), (second, factor) = list(
        training_dataset(Arrays(np.arange(20)), plan, excluded=frozenset({bad})).take(2)
    )
    assert float(first) == 1
    assert second.numpy().tolist() == [n for n in order[4:8] if n != bad]
    assert float(factor) == 0.75
