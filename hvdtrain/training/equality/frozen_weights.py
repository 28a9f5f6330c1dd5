"""The weights that no step changes: those of frozen and of quantized layers."""

import keras

from hvdtrain.seams import keras_internals


def frozen_weights(model: keras.Model) -> list[keras.Variable]:
    """The weights that were made to be trained but are not, and those of quantized layers; without statistics."""
    layers = keras_internals.FLATTEN_LAYERS.of(model)()
    statistics = {
        id(variable)
        for layer in layers
        if getattr(layer, "quantization_mode", None) is None
        for variable in keras_internals.NON_TRAINABLE_VARIABLES.of(layer)
    }
    return [variable for variable in model.non_trainable_weights if id(variable) not in statistics]
