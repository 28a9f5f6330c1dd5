"""Data sets whose order, or whose elements, functions draw without a seed."""

import pytest
import tensorflow as tf

from hvdtrain.data import sharded_order
from hvdtrain.data.random_functions import draws_without_seed
from hvdtrain.distributed.dataset_inputs import with_inputs
from hvdtrain.errors import UsageError

NUMBERS = tf.data.Dataset.range(8)


def within(number):
    return tf.data.Dataset.range(number).shuffle(8)


def within_seeded(number):
    return tf.data.Dataset.range(number).shuffle(8, seed=1)


DRAWING = {
    "filter": lambda: NUMBERS.filter(lambda number: tf.random.uniform([]) < 0.5),
    "flat_map": lambda: NUMBERS.flat_map(within),
    "interleave": lambda: NUMBERS.interleave(within),
    "parallel interleave": lambda: NUMBERS.interleave(within, num_parallel_calls=2),
}
OTHERS = {
    "map": lambda: NUMBERS.map(lambda number: tf.random.uniform([])),
    "parallel map": lambda: NUMBERS.map(lambda number: tf.random.uniform([]), num_parallel_calls=2),
    "seeded filter": lambda: NUMBERS.filter(lambda number: tf.random.uniform([], seed=1) < 0.5),
    "stateless filter": lambda: NUMBERS.filter(lambda number: tf.random.stateless_uniform([], (1, number)) < 0.5),
    "filter": lambda: NUMBERS.filter(lambda number: number > 3),
    "legacy filter": lambda: tf.compat.v1.data.Dataset.range(8).filter_with_legacy_function(lambda number: number > 3),
    "seeded flat_map": lambda: NUMBERS.flat_map(within_seeded),
    "seeded interleave": lambda: NUMBERS.interleave(within_seeded),
}


@pytest.fixture
def set_seed():
    yield tf.random.set_seed
    tf.random.set_seed(0)


@pytest.mark.parametrize("kind", DRAWING)
def test_what_depends_on_numbers_without_a_seed(kind, set_seed, monkeypatch):
    monkeypatch.setattr(sharded_order, "_orders", [])
    set_seed(None)
    dataset = DRAWING[kind]()
    assert draws_without_seed(dataset)
    with pytest.raises(UsageError, match="shuffled, or filtered at random, without a seed"):
        sharded_order.note(dataset.batch(2))
    set_seed(3)
    assert not draws_without_seed(DRAWING[kind]())


@pytest.mark.parametrize("kind", OTHERS)
def test_what_does_not(kind, set_seed):
    set_seed(None)
    assert not any(draws_without_seed(each) for each in with_inputs(OTHERS[kind]()))
