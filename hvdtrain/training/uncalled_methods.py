"""Methods of Keras that a model's class overrides, and that hvdtrain does the work of instead: a line says so."""

import keras

from hvdtrain.distributed import runtime

_told: set[tuple[type, str]] = set()


def uncalled(model: keras.Model, method: str, instead: str) -> str | None:
    """What to tell of a method that is not called; None if it is Keras' own, or has been told of.

    Args:
        method: of ``keras.Model``, such as ``fit``.
        instead: what is called, as in ``Trainer calls train_step itself``.
    """
    owner = next(each for each in type(model).__mro__ if method in vars(each))
    # What KerasHub's methods add is done: see hvdtrain.data.preprocessed.
    adds_nothing = owner.__module__.partition(".")[0] == "keras" or hasattr(model, "preprocess_samples")
    if adds_nothing or (owner, method) in _told or runtime.on_unequal() == "ignore":
        return None
    _told.add((owner, method))
    return f"{instead}, and not {owner.__name__}.{method}: what else that method does is left out"
