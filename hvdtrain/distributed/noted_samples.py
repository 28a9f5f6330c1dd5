"""The samples that each rank passes to ``model.fit``: whether ranks have divided them can be seen."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from hvdtrain.distributed.dataset_inputs import with_inputs
from hvdtrain.seams import tensorflow_internals

_MAX_SAMPLES = 1 << 20
"""Two seconds of a core."""
_NUM_KEPT = 256
_NUM_VALUES = 128
"""Of a sample, by which it is recognized."""


class NotedSamples(NamedTuple):
    """Samples, of which a part is kept: those with the smallest digests, which are the same samples on all ranks."""

    number: int
    num_distinct: int
    kept: list[bytes]
    """Digests, ascending."""


_arguments: ContextVar[list[Mapping[str, Any]]] = ContextVar("arguments of a fit")


@contextmanager
def samples_noted(arguments: Mapping[str, Any]) -> Iterator[None]:
    """In the block, a ``model.fit`` runs with these arguments."""
    token = _arguments.set([arguments])
    try:
        yield
    finally:
        _arguments.reset(token)


def take() -> NotedSamples | None:
    """What the current ``model.fit`` trains on; None if that is not in memory, is too much, or has been taken."""
    noted = _arguments.get([])
    if not noted:
        return None
    digests = _digests(**noted.pop())
    distinct = sorted(set(digests))
    return NotedSamples(len(digests), len(distinct), distinct[:_NUM_KEPT]) if digests else None


def _digests(x: Any = None, y: Any = None, **others: Any) -> list[bytes]:
    """A digest of each sample."""
    arrays = _arrays_of_dataset(x) if isinstance(x, tf.data.Dataset) else _arrays((x, y))
    numbers = {len(array) for array in arrays}
    if len(numbers) != 1 or not 0 < max(numbers) <= _MAX_SAMPLES:
        return []
    samples = zip(*map(_rows, arrays), strict=True)
    return [blake2b(b"".join(parts), digest_size=8).digest() for parts in samples]


def _arrays(data: Any) -> list[np.ndarray]:
    arrays = []
    for each in tf.nest.flatten(data):
        if each is None:
            continue
        # Files that are mapped into memory would be read, as would other containers.
        if isinstance(each, np.memmap) or not (isinstance(each, np.ndarray | tf.Tensor) or hasattr(each, "to_numpy")):
            return []
        array = np.asarray(each) if getattr(each, "dtype", None) != tf.variant else np.empty(())
        if not array.ndim or array.dtype.kind not in "biufSUO":
            return []
        arrays.append(array)
    return arrays


def _arrays_of_dataset(dataset: tf.data.Dataset) -> list[np.ndarray]:
    """The arrays that a data set is made of, if it has all of their samples."""
    made_of = list(with_inputs(dataset))
    if any(type(each).__name__ not in tensorflow_internals.COMPLETE_DATASETS for each in made_of):
        return []
    return _arrays([vars(each).get(tensorflow_internals.DATASET_ARRAYS, []) for each in made_of])


def _rows(array: np.ndarray) -> list[bytes]:
    rows = array.reshape(len(array), -1)
    if rows.shape[1] > _NUM_VALUES:
        # Not evenly spaced: columns of an image may be empty.
        rows = rows[:, np.random.default_rng(0).choice(rows.shape[1], _NUM_VALUES, replace=False)]
    is_text = array.dtype.kind in "SUO"
    return [repr(row.tolist()).encode() if is_text else row.tobytes() for row in rows]
