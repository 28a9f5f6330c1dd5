"""What the ranks do with a model: they train it together, or each alone."""

import keras

# Past Keras' __setattr__, which would look for variables.
_REPLICATED, _AVERAGED = "hvdtrain_is_replicated", "hvdtrain_is_averaged"


def note_replicated(model: keras.Model) -> None:
    """Notes that all ranks have received the same values of a model, and so are meant to train it together."""
    vars(model)[_REPLICATED] = True


def is_replicated(model: keras.Model) -> bool:
    """Whether all ranks have received the same values of a model."""
    return vars(model).get(_REPLICATED, False)


def note_averaged(model: keras.Model) -> None:
    """Notes that each rank trains a model alone, and that its parameters are averaged."""
    vars(model)[_AVERAGED] = True


def is_averaged(model: keras.Model) -> bool:
    """Whether the parameters of a model are averaged while each rank trains it alone."""
    return vars(model).get(_AVERAGED, False)
