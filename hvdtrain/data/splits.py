"""The splits of a data set: training samples, and optionally evaluation samples. Converts samples to sources."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.data.arrays import Arrays
from hvdtrain.data.random_access import Batches, RandomAccess
from hvdtrain.data.source import Source
from hvdtrain.data.stream import Stream
from hvdtrain.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Data:
    """Training and evaluation samples, with the facts about them that a model may depend on.

    Samples are sources, or anything that :func:`as_source` converts to one.

    Raises:
        UsageError: no source can read the samples.
    """

    training: Source
    """The samples to train on."""
    evaluation: Source | None = None
    """None: no evaluation."""
    num_classes: int | None = None
    """For models whose output layer depends on the data."""
    vocabulary: Sequence[str] = ()
    """For text models: the words, indexed by token number."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "training", as_source(self.training))
        if self.evaluation is not None:
            object.__setattr__(self, "evaluation", as_source(self.evaluation))


def as_source(samples: Any) -> Source:
    """A source of whatever Keras accepts: a ``tf.data.Dataset``, a PyDataset, arrays or structures of them.

    A tuple is x, y and the sample weights.

    Raises:
        UsageError: no source can read the samples.
    """
    if hasattr(samples, "training_batches"):
        return samples
    if isinstance(samples, tf.data.Dataset):
        return Stream(samples)
    if isinstance(samples, keras.utils.PyDataset):
        return Batches(samples)
    if isinstance(samples, tuple) and 1 <= len(samples) <= 3:
        return Arrays(*samples)
    if isinstance(samples, Mapping) or hasattr(samples, "__array__") or hasattr(samples, "tocsr"):
        return Arrays(samples)
    if hasattr(samples, "__len__") and hasattr(samples, "__getitem__") and not isinstance(samples, str | bytes):
        return RandomAccess(samples)
    raise UsageError(
        "data must be a source of hvdtrain.data, a tf.data.Dataset, a PyDataset, arrays, or have a length and an "
        f"index. Received: {type(samples).__name__}. Wrap a generator in tf.data.Dataset.from_generator."
    )
