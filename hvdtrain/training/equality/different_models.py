"""How the models of the ranks differ, as a possible cause of a step that is not that of one process."""

import keras

from hvdtrain.distributed.agreement import differences
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.descriptions import configuration, described
from hvdtrain.seams import keras_internals


def differences_of_models(model: keras.Model, collectives: Collectives) -> str:
    """How losses or layers differ, by their configurations; empty if they do not. All ranks must call it.

    They may differ on purpose, so that a difference need not be the cause.
    """
    facts = {"loss": described(getattr(model, "loss", None))}
    for number, layer in enumerate(keras_internals.FLATTEN_LAYERS.of(model)()):
        name = f"layer {number}"
        facts[name] = type(layer).__name__
        # That of a model repeats those of its layers.
        config = {} if isinstance(layer, keras.Model) else configuration(layer)
        facts |= {f"{key} of {name} ({type(layer).__name__})": value for key, value in config.items()}
    return differences(facts, collectives)
