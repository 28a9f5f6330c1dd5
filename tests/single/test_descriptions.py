"""Descriptions of Keras objects that ranks compare."""

import keras
import numpy as np
import pytest

from hvdtrain.distributed.descriptions import configuration, described


def function(x):
    return x


class WithoutConfiguration(keras.layers.Layer):
    """Keras cannot describe its argument, and refuses to."""

    def __init__(self, argument):
        super().__init__()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (np.float32(0.5), 0.5),
        (np.arange(2), [0, 1]),
        ({0: 1.0, "name": "dense_3", "seed": 7}, {"0": 1.0}),
        (("mse", function), ["mse", "function"]),
        (keras.losses.Huber, "Huber"),
        (keras.regularizers.L2(0.5), {"L2": {"l2": 0.5}}),
        (WithoutConfiguration(object()), {"WithoutConfiguration": {}}),
        (object(), "object"),
    ],
)
def test_what_is_described(value, expected):
    assert described(value) == expected


def test_equal_objects_of_other_names_have_equal_descriptions():
    first, second = (configuration(keras.layers.Dense(2, kernel_regularizer="l2")) for _ in range(2))
    assert first == second
    assert first["kernel_regularizer"] == {"L2": {"l2": pytest.approx(0.01)}}
