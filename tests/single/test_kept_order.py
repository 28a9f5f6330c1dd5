"""Data sets in the order of their elements, whatever their options and operations say."""

import warnings

import pytest
import tensorflow as tf

from hvdtrain.data import kept_order
from hvdtrain.errors import UsageError

NUMBERS = tf.data.Dataset.range(24)


def unordered() -> tf.data.Options:
    options = tf.data.Options()
    options.deterministic = False
    return options


def one(number):
    return tf.data.Dataset.from_tensors(number)


PARALLEL = {
    "map": lambda **order: NUMBERS.map(tf.identity, num_parallel_calls=4, **order),
    "batch": lambda **order: NUMBERS.batch(2, num_parallel_calls=4, **order),
    "interleave": lambda **order: NUMBERS.interleave(one, num_parallel_calls=4, **order),
    "interleave of experimental": lambda deterministic=True: NUMBERS.apply(
        tf.data.experimental.parallel_interleave(one, cycle_length=4, sloppy=not deterministic)
    ),
}


@pytest.mark.parametrize("kind", PARALLEL)
def test_operations_that_change_the_order_are_refused(kind):
    with pytest.raises(UsageError, match=r"in the same order on all ranks .* deterministic=False\. Leave that out"):
        kept_order.in_order(PARALLEL[kind](deterministic=False).take(9).prefetch(2))
    for dataset in (PARALLEL[kind](), PARALLEL[kind](deterministic=True)):
        assert kept_order.in_order(dataset) is dataset


def test_options_do_not_change_the_order_of_what_is_sharded():
    dataset = PARALLEL["map"]().with_options(unordered()).prefetch(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ordered = kept_order.in_order(dataset)
    assert (dataset.options().deterministic, ordered.options().deterministic) == (False, True)
    assert list(ordered.as_numpy_iterator()) == list(range(24))


@pytest.mark.parametrize("is_sharded", [True, False])
def test_options_that_are_set_later_do_not_change_it_either(is_sharded):
    dataset = PARALLEL["map"]()
    if is_sharded:
        kept_order.note_shard(dataset)
    options = unordered()
    options.threading.private_threadpool_size = 3
    later = dataset.shard(2, 0).batch(2).with_options(options, name="later").options()
    assert later.deterministic is is_sharded
    assert later.threading.private_threadpool_size == 3
