"""The variables of a model and its optimizer that local SGD averages: every float variable, each once."""

from collections.abc import Iterable

import keras
import tensorflow as tf

from hvdtrain.config.wording import option
from hvdtrain.distributed.optimizers import leaves_of
from hvdtrain.errors import UsageError
from hvdtrain.seams import keras_internals


def trained(model: keras.Model) -> list[keras.Variable]:
    """Trainable variables: those the optimizer updates."""
    return _floats(model.trainable_variables)


def followed(model: keras.Model) -> list[keras.Variable]:
    """Variables that follow the trained ones: BatchNormalization statistics, and EMA copies of the weights."""
    taken = {id(variable) for variable in trained(model)}
    averages = [
        variable
        for leaf in leaves_of(model)
        if leaf.use_ema
        for variable in keras_internals.EMA.of(leaf)
        if variable is not None
    ]
    return [variable for variable in _floats([*model.weights, *averages]) if id(variable) not in taken]


def slots(model: keras.Model) -> list[keras.Variable]:
    """Optimizer slots, such as momentum.

    Raises:
        UsageError: a slot is not a float.
    """
    found = []
    for leaf in leaves_of(model):
        others = [keras_internals.ITERATIONS.of(leaf), keras_internals.LEARNING_RATE.of(leaf)]
        others += keras_internals.EMA.of(leaf) if leaf.use_ema else []
        taken = {id(variable) for variable in others}
        found += [variable for variable in leaf.variables if id(variable) not in taken]
    for variable in found:
        if not keras.backend.is_float_dtype(variable.dtype):
            raise UsageError(
                f"optimizer variables must be floats to be averaged. Received: {variable.path!r} of dtype "
                f"{variable.dtype}. Use {option('average_slots', 'keep')}."
            )
    return _floats(found)


def _floats(variables: Iterable[keras.Variable]) -> list[keras.Variable]:
    unique = {id(variable): variable for variable in variables}
    return [variable for variable in unique.values() if tf.as_dtype(variable.dtype).is_floating]
