"""Captures and restores the global random state of a process: Python's, NumPy's and Keras' global generator."""

import random
from typing import Any

import numpy as np

from hvdtrain.seams import keras_internals

# The name of Keras' global generator among its global attributes; before Keras 3.13 there is no constant for it.
_KERAS_GENERATOR = "global_seed_generator"


def capture() -> dict[str, Any]:
    """Returns the state as plain values; see :mod:`hvdtrain.checkpoint.plain_values`."""
    version, internal, gauss_next = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    keras_generator = keras_internals.GLOBAL_ATTRIBUTE.value()(_KERAS_GENERATOR)
    return {
        "python": {"version": version, "internal": np.array(internal, np.uint32), "gauss_next": gauss_next},
        "numpy": {"kind": kind, "keys": keys, "position": position, "has_gauss": has_gauss, "cached": cached},
        "keras": None if keras_generator is None else keras_generator.state.numpy(),
    }


def restore(state: dict[str, Any]) -> None:
    """Restores a state that :func:`capture` returned."""
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(int(each) for each in python["internal"]), python["gauss_next"]))
    np.random.set_state((numpy["kind"], numpy["keys"], numpy["position"], numpy["has_gauss"], numpy["cached"]))
    if state["keras"] is None:
        # The next one takes its seed from Python's generator.
        keras_internals.SET_GLOBAL_ATTRIBUTE.value()(_KERAS_GENERATOR, None)
    else:
        keras_internals.GLOBAL_GENERATOR.value()().state.assign(state["keras"])
