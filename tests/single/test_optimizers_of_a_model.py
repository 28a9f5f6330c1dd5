"""The optimizers that a model trains with."""

import keras
import pytest
from keras import layers

from hvdtrain.distributed.optimizers import build_optimizer, optimizers_of


def model_with(*optimizers: keras.optimizers.Optimizer, **compile_options) -> keras.Model:
    """With some optimizers as attributes, and compile()'s own."""
    model = keras.Sequential([layers.Input((2,)), layers.Dense(1)])
    for number, optimizer in enumerate(optimizers):
        setattr(model, f"optimizer_{number}", optimizer)
    model.compile(loss="mse", **compile_options)
    return model


def test_what_compile_adds_unasked_is_left_out():
    first, second = keras.optimizers.Adam(), keras.optimizers.SGD()
    assert optimizers_of(model_with(first, second)) == [first, second]
    (only,) = optimizers_of(model_with())
    assert isinstance(only, keras.optimizers.RMSprop)
    # One that differs from the default has been asked for.
    asked = keras.optimizers.RMSprop(0.01)
    assert optimizers_of(model_with(first, optimizer=asked)) == [asked, first]


def test_what_compile_adds_for_mixed_precision_is_left_out():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        first = keras.optimizers.Adam()
        assert optimizers_of(model_with(first)) == [first]
    finally:
        keras.config.set_dtype_policy("float32")


def test_an_optimizer_under_several_names_counts_once():
    adam = keras.optimizers.Adam()
    assert optimizers_of(model_with(adam, adam, optimizer=adam)) == [adam]


@pytest.mark.parametrize("others", [0, 1])
def test_only_a_single_optimizer_is_built(others):
    model = model_with(*[keras.optimizers.SGD() for _ in range(others)], optimizer="adam")
    build_optimizer(model)
    assert model.optimizer.built == (others == 0)
