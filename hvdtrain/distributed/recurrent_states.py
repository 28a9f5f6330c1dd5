"""The states that stateful recurrent layers keep between batches: each rank has its own, and they are no weights."""

import keras

from hvdtrain.seams import keras_internals


def recurrent_states(model: keras.Model) -> list[keras.Variable]:
    """The states of all stateful layers of a model; empty before they are built."""
    layers = [each for each in keras_internals.FLATTEN_LAYERS.of(model)() if isinstance(each, keras.layers.RNN)]
    states = [state for layer in layers if layer.stateful for state in keras.tree.flatten(layer.states)]
    return [state for state in states if isinstance(state, keras.Variable)]
