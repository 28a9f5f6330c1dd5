"""What the generators of data sets that are sharded yield first."""

import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.data import generated_order, sharded_order

NUMBERS = np.arange(40)


@pytest.fixture(autouse=True)
def nothing_noted(monkeypatch):
    monkeypatch.setattr(sharded_order, "_orders", [])
    monkeypatch.setattr(generated_order, "_of_sharded", [])


def read(generate, signature, *, num_read=None, args=None) -> list:
    """What a rank has noted that has sharded what this generates, and read some of it."""
    generated_order._of_sharded.clear()
    dataset = tf.data.Dataset.from_generator(generate, output_signature=signature, args=args)
    sharded_order.note(dataset.batch(2))
    for _ in dataset.take(num_read or 99):
        pass
    return generated_order.noted()


def numbers(order, augment=lambda number: number):
    def generate():
        yield from ((np.full(3, augment(number), np.float32), np.int64(number)) for number in NUMBERS[order])

    return generate


SIGNATURE = (tf.TensorSpec((3,), tf.float32), tf.TensorSpec((), tf.int64))
SAME, OTHER = slice(None), slice(None, None, -1)


def test_generators_that_yield_in_another_order():
    ranks = [read(numbers(SAME), SIGNATURE), read(numbers(SAME), SIGNATURE, num_read=5)]
    assert [len(each) for (each,) in ranks] == [16, 5]
    assert not generated_order.differ(ranks)
    assert generated_order.differ([ranks[0], read(numbers(OTHER), SIGNATURE, num_read=1)])


def test_labels_tell_samples_that_are_augmented_from_those_in_another_order():
    random = np.random.default_rng(0)
    ranks = [read(numbers(SAME, lambda number: random.normal()), SIGNATURE) for _ in range(2)]
    assert not generated_order.differ(ranks)


def test_generators_that_ranks_do_not_have_or_shard():
    one = read(numbers(SAME), SIGNATURE)
    assert not generated_order.differ([one, []])
    generated_order._of_sharded.clear()
    list(tf.data.Dataset.from_generator(numbers(SAME), output_signature=SIGNATURE))
    assert generated_order.noted() == []


def test_only_the_first_pass_is_noted():
    orders = [SAME, OTHER]

    def generate():
        yield from numbers(orders.pop(0))()

    dataset = tf.data.Dataset.from_generator(generate, output_signature=SIGNATURE)
    sharded_order.note(dataset)
    passes = [[int(number) for _, number in dataset] for _ in range(2)]
    assert passes == [[*NUMBERS], [*NUMBERS[OTHER]]]
    assert not generated_order.differ([generated_order.noted(), read(numbers(SAME), SIGNATURE)])


@pytest.mark.parametrize(
    ("generate", "signature", "args"),
    [
        (lambda: [b"a", b"b"], tf.TensorSpec((), tf.string), None),
        (lambda: iter([[1, 2], [3, 4]]), tf.TensorSpec((2,), tf.int64), None),
        (
            lambda: ({"a": number, "b": [number]} for number in range(2)),
            {"a": tf.TensorSpec(()), "b": tf.TensorSpec(1)},
            None,
        ),
        (lambda number: range(int(number)), tf.TensorSpec((), tf.int64), (2,)),
    ],
)
def test_what_generators_yield_is_left_as_it_is(generate, signature, args):
    expected = list(generated_order._from_generator_here(generate, output_signature=signature, args=args))
    found = list(tf.data.Dataset.from_generator(generate, output_signature=signature, args=args))
    tf.nest.map_structure(np.testing.assert_array_equal, expected, found)
    assert len(found) == 2
    (elements,) = read(generate, signature, args=args)
    assert len(elements) == 2


def test_errors_are_those_of_tensorflow():
    with pytest.raises(TypeError, match="`generator` must be"):
        tf.data.Dataset.from_generator([1, 2], output_signature=tf.TensorSpec((), tf.int64))

    def fail():
        yield 1
        raise ValueError("no more")

    with pytest.raises(tf.errors.InvalidArgumentError, match="no more"):
        list(tf.data.Dataset.from_generator(fail, output_signature=tf.TensorSpec((), tf.int64)))
