"""Models that are made for measurements, and that leave no trace in what is made later."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from hvdtrain.checkpoint import random_state
from hvdtrain.seams import keras_internals

_NAME_COUNTERS = "object_name_uids"


@contextmanager
def temporary_models() -> Iterator[None]:
    """In the block, models are made and deleted again: names of later layers and random numbers are as without it."""
    counters = _name_counters()
    state = random_state.capture()
    try:
        yield
    finally:
        random_state.restore(state)
        names = keras_internals.GLOBAL_ATTRIBUTE.value()(_NAME_COUNTERS)
        if names is not None:
            names.clear()
            names.update(counters)
        gc.collect()  # Models and their compiled steps refer to each other.


def _name_counters() -> dict[str, int]:
    """How many objects have each name that Keras gave."""
    return dict(keras_internals.GLOBAL_ATTRIBUTE.value()(_NAME_COUNTERS) or {})
