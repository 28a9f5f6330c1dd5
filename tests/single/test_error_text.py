"""Errors of TensorFlow, Keras and Python, as they are raised, in one line."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from hvdtrain.system import error_text


class Fails(layers.Layer):
    def call(self, x):
        return tf.nn.conv2d(x, tf.zeros((1, 1, 1, 1)), 1, padding="valid")


def fails_in_call():
    Fails()(np.ones((2, 4, 4, 1), "float32"))


def fails_in_a_model():
    keras.Sequential([layers.Input((4, 4, 1)), Fails()])


@tf.function
def fails_in_a_graph(x):
    return tf.concat([x, tf.ones((1, 2))], 0)


@tf.function
def fails_in_user_code(x):
    if tf.reduce_sum(x) > 0:
        x = keras.backend.no_such_name(x)
    return x


def fails_in_a_lookup():
    layers.Embedding(4, 2)(np.array([[9]]))


def fails_in_fit():
    model = keras.Sequential([layers.Input((), dtype="int32"), layers.Embedding(4, 2), layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(np.full(8, 59), np.ones((8, 1)), verbose=0)


def fails_without_text():
    raise KeyError


@pytest.mark.parametrize(
    ("fail", "expected"),
    [
        (fails_in_call, "InvalidArgumentError: Value for attr 'padding' of \"valid\" is not in the list of .*"),
        (fails_in_a_model, "ValueError: Attr 'padding' of 'Conv2D' Op passed string 'valid' not in: .*"),
        (
            lambda: fails_in_a_graph(tf.ones((1, 3))),
            "ValueError: Dimension 0 in both .* are 3 and 2.* 'concat = Concat.*",
        ),
        (lambda: fails_in_user_code(np.ones(3)), "AttributeError: module 'keras.* has no attribute 'no_such_name'"),
        (fails_in_a_lookup, r"InvalidArgumentError: .*indices\[0,0\] = 9 is not in \[0, 4\)"),
        (fails_in_fit, r"InvalidArgumentError: indices\[\d\] = 59 is not in \[0, 4\)"),
        (lambda: int("x"), r"ValueError: invalid literal for int\(\) with base 10: 'x'"),
        (fails_without_text, "KeyError"),
    ],
)
def test_the_line_says_what_is_wrong(fail, expected):
    with pytest.raises(Exception) as caught:
        fail()
    line = error_text.class_and_message(caught.value)
    assert re.fullmatch(expected, line), line
