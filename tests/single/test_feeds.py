"""Feeds start anywhere, on any number of ranks, with a dataset that is traced once."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.data import Arrays, Stream
from hvdtrain.data.bad_samples import BadSampleQuota
from hvdtrain.data.feeds import EvaluationFeed, TrainingFeed
from hvdtrain.data.sample_plan import SamplePlan, shard_batches
from hvdtrain.distributed.single_process import SingleProcessCollectives

NUM_SAMPLES = 40


class Traced:
    """A function of samples that counts how often it is traced."""

    def __init__(self):
        self.times = 0

    def __call__(self, x, *_):
        self.times += 1
        return (x,)


class Numbered(Arrays):
    def __init__(self, traced):
        super().__init__(np.arange(NUM_SAMPLES))
        self._traced = traced

    def _read(self, numbers):
        return self._traced(*super()._read(numbers))


def streamed(traced):
    return Stream(tf.data.Dataset.range(NUM_SAMPLES), transform=traced)


def quota():
    return BadSampleQuota(0, SingleProcessCollectives())


def read(feed, count):
    return [next(feed.iterator) for _ in range(count)]


@pytest.mark.parametrize("make_source", [Numbered, streamed])
def test_training_restarts_with_other_ranks_without_being_traced_again(make_source):
    traced = Traced()
    source = make_source(traced)
    plan = SamplePlan(num_samples=NUM_SAMPLES, batch_size=3, rank=1, size=4, seed=5, shuffle=not source.keeps_order)
    feed = TrainingFeed(source, plan, quota())
    times = traced.times
    assert feed.element_spec
    once = traced.times - times
    first = None
    for changes, micro_batch in [
        ({}, 0),
        ({}, 6),  # within an epoch, and beyond it
        ({"size": 2, "batch_size": 6}, 9),
        ({"rank": 0, "size": 1, "batch_size": 12}, 2),
        ({"rank_batch_sizes": (12,)}, 0),
    ]:
        feed.plan = dataclasses.replace(feed.plan, **changes)
        feed.start(micro_batch)
        first = first or feed.iterator
        drawn = [feed.plan.draw(micro_batch + i) for i in range(5)]
        found = [(x.numpy().tolist(), float(weight)) for x, weight in read(feed, 5)]
        assert found == [(numbers.tolist(), pytest.approx(weight)) for numbers, weight in drawn]
    assert feed.iterator is first
    assert traced.times - times == once


@pytest.mark.parametrize("make_source", [Numbered, streamed])
def test_evaluation_restarts_with_other_ranks_without_being_traced_again(make_source):
    traced = Traced()
    source = make_source(traced)
    ranks = SimpleNamespace(rank=1, size=3)
    feed = EvaluationFeed(source, 4, ranks, quota())
    times, once = traced.times, None
    for rank, size in [(1, 3), (1, 3), (0, 1), (6, 7)]:
        ranks.rank, ranks.size = rank, size
        feed.restart()
        expected = [batch.tolist() for batch in shard_batches(NUM_SAMPLES, 4, rank, size)]
        assert feed.num_batches == len(expected)
        assert [tf.nest.flatten(batch)[0].numpy().tolist() for batch in feed.iterator] == expected
        once = once or traced.times - times
    assert traced.times - times == once
