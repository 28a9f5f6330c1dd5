"""Random access: the base of all sources whose samples are read by number."""

import abc
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.data.bad_samples import BadSample
from hvdtrain.data.pipeline import Augment, map_samples, random_access_evaluation, random_access_training
from hvdtrain.data.sample_draws import SampleDraws

Parts = tuple[Any, ...]
"""``(x,)``, ``(x, y)`` or ``(x, y, sample_weight)``; each a structure of arrays or tensors."""


class NumberedSource(abc.ABC):
    """A source that reads any batch of sample numbers."""

    keeps_order = False
    can_change = False
    bad_samples: Sequence[BadSample] = ()
    num_samples: int

    def __init__(self, augment: Augment | None = None):
        self._augment = augment

    @abc.abstractmethod
    def _read(self, numbers: tf.Tensor) -> Parts:
        """The batch with these samples; called while a dataset is traced."""

    @abc.abstractmethod
    def facts(self) -> dict[str, Any]:
        """Facts that must be equal on all ranks."""

    def check_unchanged(self) -> None:  # noqa: B027
        """Does nothing: there are no files that hvdtrain knows of."""

    def find_bad(self, numbers: np.ndarray) -> list[BadSample]:
        """Returns an empty list: nothing is parsed."""
        return []

    def training_batches(self, draws: SampleDraws) -> tf.data.Dataset:
        return random_access_training(self._read_augmented, draws)

    def evaluation_batches(self, draw: Callable[[], list[np.ndarray]]) -> tf.data.Dataset:
        return random_access_evaluation(lambda numbers: as_keras_packs(self._read(numbers)), draw)

    def _read_augmented(self, numbers: tf.Tensor, seeds: tf.Tensor) -> Any:
        parts = self._read(numbers)
        if self._augment is not None:
            augment = self._augment
            if len(parts) == 1:
                parts = map_samples(lambda x, seed: (augment(x, None, seed)[0],), parts[0], seeds)
            else:
                parts = (*map_samples(augment, parts[0], parts[1], seeds), *parts[2:])
        return as_keras_packs(parts)


def as_keras_packs(parts: Parts) -> Any:
    """What ``train_step`` receives from ``model.fit`` for the same data: x alone is not in a tuple."""
    return keras.utils.pack_x_y_sample_weight(*parts)


def read_with_numpy(read: Any, numbers: tf.Tensor, specs: Sequence[tf.TensorSpec]) -> list[tf.Tensor]:
    """A Python function of sample numbers that returns NumPy arrays, as part of a dataset."""
    if not specs:
        return []
    tensors = tf.numpy_function(read, [numbers], [spec.dtype for spec in specs])
    for tensor, spec in zip(tensors, specs, strict=True):
        tensor.set_shape(spec.shape)
    return list(tensors)
