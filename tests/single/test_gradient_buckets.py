"""Gradient buckets: which gradients share one, and that they come out as they went in."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from hvdtrain.distributed.gradient_buckets import BUCKET_BYTES, bucket_layout
from hvdtrain.distributed.gradient_reduction import with_shapes_of

LARGE = BUCKET_BYTES // 4


def zeros(*counts: int, dtype=tf.float32) -> list[tf.Tensor]:
    return [tf.zeros(count, dtype) for count in counts]


@pytest.mark.parametrize(
    ("tensors", "count", "members"),
    [
        (zeros(1, 2, 3), None, [[2, 1, 0]]),
        # A large gradient does not close the open bucket of small ones.
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
def test_members_of_buckets(tensors, count, members):
    assert bucket_layout(tensors, count).members == members


@pytest.mark.parametrize("count", [None, 1])
def test_a_gradient_of_unknown_shape_has_a_bucket_of_its_own(count):
    @tf.function(input_signature=[tf.TensorSpec([None]), tf.TensorSpec([2]), tf.TensorSpec([3])])
    def pack_and_unpack(*tensors: tf.Tensor):
        layout = bucket_layout(tensors, count)
        assert sorted(map(sorted, layout.members)) == [[0], [1, 2]]
        return layout.unpack(layout.pack(tensors))

    tensors = [tf.ones(7), tf.ones(2), tf.ones(3)]
    for before, after in zip(tensors, pack_and_unpack(*tensors), strict=True):
        assert np.array_equal(before, after)


@pytest.mark.parametrize("count", [None, 1, 2, 4])
def test_shapes_are_restored(count):
    shapes = [(2, 3), (), (4,), (1, 1, 5)]
    tensors = [tf.random.normal(shape) for shape in shapes]
    layout = bucket_layout(tensors, count)
    for before, after in zip(tensors, layout.unpack(layout.pack(tensors)), strict=True):
        assert before.shape == after.shape
        assert np.array_equal(before, after)


def test_gradients_have_the_shapes_of_their_variables():
    model = keras.Sequential([layers.Input((None,)), layers.Embedding(9, 3), layers.LSTM(4, return_sequences=True)])
    model.add(layers.Dense(2))
    variables = model.trainable_variables
    unknown = []

    @tf.function(input_signature=[tf.TensorSpec([None, None])])
    def is_known(x: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x) ** 2)
        own = tape.gradient(loss, variables)
        unknown.extend(each for each in own if not tf.convert_to_tensor(each).shape.is_fully_defined())
        found = with_shapes_of(variables, own)
        # A sparse gradient stays sparse.
        assert [type(each) for each in found] == [type(each) for each in own]
        assert [tf.convert_to_tensor(each).shape for each in found] == [each.shape for each in variables]
        return [
            tf.reduce_all(tf.convert_to_tensor(a) == tf.convert_to_tensor(b)) for a, b in zip(own, found, strict=True)
        ]

    assert all(is_known(np.arange(10, dtype=np.float32).reshape(2, 5) % 9))
    if not unknown:
        pytest.skip("this version of TensorFlow knows the shapes of all gradients")
