"""Whether ranks shard the same data in the same order: otherwise some samples are seen twice, and others never."""

import hashlib
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.errors import UsageError
from hvdtrain.seams import tensorflow_internals

_NUM_COMPARED = 16
_orders: list[str] = []


def note(data: Any) -> None:
    """Notes the order of data that is about to be sharded.

    Raises:
        UsageError: it is shuffled without a seed.
    """
    parts = []
    for each in tf.nest.flatten(data):
        if isinstance(each, tf.data.Dataset):
            parts += _shuffles(each)
        elif hasattr(each, "__getitem__") and len(getattr(each, "shape", [])):
            parts.append(_some_rows(each))
    _orders.append(" ".join(parts))


def noted() -> list[str]:
    """The orders of the data that this rank has sharded, for comparison with other ranks."""
    return list(_orders)


def _shuffles(dataset: tf.data.Dataset) -> list[str]:
    """The seeds of all shuffles that a data set is made of."""
    found = []
    waiting = [dataset]
    while waiting:
        each = waiting.pop()
        waiting += tensorflow_internals.DATASET_INPUTS.of(each)()
        seeds = [vars(each).get(name) for name in tensorflow_internals.SHUFFLE_SEEDS]
        if None in seeds:
            continue
        numbers = [int(seed) for seed in seeds]
        if numbers == [0, 0]:
            raise UsageError(
                "data must be in the same order on all ranks when it is sharded. Received: a data set that is shuffled "
                "without a seed. Call hvdtrain.init(seed=…) first, pass a seed to shuffle, or shuffle what "
                "hvdtrain.shard returns."
            )
        found.append(str(numbers))
    return found


def _some_rows(array: Any) -> str:
    """A digest of a few rows."""
    length = array.shape[0]
    rows = np.linspace(0, length - 1, min(length, _NUM_COMPARED)).astype(int)
    digest = hashlib.sha256()
    for row in rows:
        digest.update(repr(np.asarray(getattr(array, "iloc", array)[int(row)])).encode())
    return digest.hexdigest()
