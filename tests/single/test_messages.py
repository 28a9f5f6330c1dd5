"""Gradients are put together and taken apart again."""

import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.messages import LARGE_BYTES, packing_of

LARGE = LARGE_BYTES // 4


def zeros(*counts: int, dtype=tf.float32) -> list[tf.Tensor]:
    return [tf.zeros(count, dtype) for count in counts]


@pytest.mark.parametrize(
    ("tensors", "count", "members"),
    [
        (zeros(1, 2, 3), None, [[2, 1, 0]]),
        # A large one holds up nothing; small ones go on in the message that is open.
        (zeros(1, LARGE, 3), None, [[2, 0], [1]]),
        (zeros(LARGE - 1, 1, 1), None, [[2, 1], [0]]),
        ([*zeros(1, 2), *zeros(3, 4, dtype=tf.float16)], None, [[3, 2], [1, 0]]),
        (zeros(1, LARGE, 3), 1, [[2, 1, 0]]),
        (zeros(1, LARGE, 3), 2, [[2, 1], [0]]),
        (zeros(1, 2, 3), 3, [[2], [1], [0]]),
        ([*zeros(1), *zeros(3, dtype=tf.float16)], 1, [[1], [0]]),
        ([], None, []),
    ],
)
def test_what_travels_together(tensors, count, members):
    assert packing_of(tensors, count).members == members


@pytest.mark.parametrize("count", [None, 1])
def test_what_has_no_known_shape_travels_alone(count):
    @tf.function(input_signature=[tf.TensorSpec([None]), tf.TensorSpec([2]), tf.TensorSpec([3])])
    def pack_and_unpack(*tensors: tf.Tensor):
        packing = packing_of(tensors, count)
        assert sorted(map(sorted, packing.members)) == [[0], [1, 2]]
        return packing.unpack(packing.pack(tensors))

    tensors = [tf.ones(7), tf.ones(2), tf.ones(3)]
    for before, after in zip(tensors, pack_and_unpack(*tensors), strict=True):
        assert np.array_equal(before, after)


@pytest.mark.parametrize("count", [None, 1, 2, 4])
def test_each_comes_back_in_its_shape(count):
    shapes = [(2, 3), (), (4,), (1, 1, 5)]
    tensors = [tf.random.normal(shape) for shape in shapes]
    packing = packing_of(tensors, count)
    for before, after in zip(tensors, packing.unpack(packing.pack(tensors)), strict=True):
        assert before.shape == after.shape
        assert np.array_equal(before, after)
