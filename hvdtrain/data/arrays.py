"""Samples in memory."""

import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.data.pipeline import Augment, map_samples, random_access_evaluation, random_access_training
from hvdtrain.data.source import BadSample
from hvdtrain.errors import DataError
from hvdtrain.sampling import SamplePlan, shard_batches


class Arrays:
    """Samples held in memory.

    Args:
        x: the inputs: an array, or a structure (dict, tuple) of arrays of shape ``[num_samples, …]``.
        y: the targets, likewise.
        sample_weight: shape ``[num_samples]``; None: every sample counts the same.
        augment: called in training as ``x, y = augment(x, y, seed)`` with single samples. ``seed``, int32
            of shape ``[2]``, is for ``tf.random.stateless_*`` and ``tf.image.stateless_random_*``; it
            depends on the plan's seed, the epoch and the sample alone.

    Raises:
        DataError: the arrays differ in their number of samples.
    """

    keeps_order = False
    can_change = False
    bad_samples: Sequence[BadSample] = ()

    def __init__(self, x: Any, y: Any, sample_weight: Any = None, *, augment: Augment | None = None):
        self.x = tf.nest.map_structure(np.asarray, x)
        self.y = tf.nest.map_structure(np.asarray, y)
        self._weights = () if sample_weight is None else (np.asarray(sample_weight, keras.config.floatx()),)
        self._augment = augment
        sizes = {len(array) if array.ndim else 0 for array in self._flat()}
        if len(sizes) != 1 or 0 in sizes:
            shapes = [array.shape for array in self._flat()]
            raise DataError(f"all arrays must hold the same number of samples, at least 1. Received shapes: {shapes}")
        self.num_samples = sizes.pop()
        self.has_sample_weights = sample_weight is not None

    def facts(self) -> dict[str, Any]:
        """The number of samples and a digest of up to 1,000 of them."""
        numbers = np.unique(np.linspace(0, self.num_samples - 1, 1000).astype(np.int64))
        digest = hashlib.sha256()
        for array in self._flat():
            digest.update(f"{array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array[numbers]).tobytes())
        return {"samples": self.num_samples, "digest": digest.hexdigest()[:12]}

    def check_unchanged(self) -> None:
        """Nothing to check: no file."""

    def find_bad(self, numbers: np.ndarray) -> list[BadSample]:
        """None: nothing is parsed."""
        return []

    def training_batches(self, plan: SamplePlan, first_micro_batch: int, excluded: frozenset[int]) -> tf.data.Dataset:
        return random_access_training(self._read_augmented, plan, first_micro_batch, excluded)

    def evaluation_batches(
        self, batch_size: int, rank: int, size: int, first_batch: int, excluded: frozenset[int]
    ) -> tf.data.Dataset:
        batches = shard_batches(self.num_samples, batch_size, rank, size, excluded)
        return random_access_evaluation(self._read, batches, first_batch)

    def _flat(self) -> list[np.ndarray]:
        return tf.nest.flatten((self.x, self.y, *self._weights))

    @functools.cached_property
    def _tensors(self) -> tuple[Any, ...]:
        # Tensors are captured by reference: the arrays are copied once, not with every data set. They are
        # asked for while a graph is made, of which they must be no part. Input runs on the CPU; a GPU's
        # memory is for the model.
        with tf.init_scope(), tf.device("CPU"):
            return tf.nest.map_structure(tf.constant, (self.x, self.y, *self._weights))

    def _read(self, numbers: tf.Tensor) -> tuple[Any, ...]:
        return tf.nest.map_structure(lambda tensor: tf.gather(tensor, numbers), self._tensors)

    def _read_augmented(self, numbers: tf.Tensor, seeds: tf.Tensor) -> tuple[Any, ...]:
        x, y, *weights = self._read(numbers)
        if self._augment is not None:
            x, y = map_samples(self._augment, x, y, seeds)
        return (x, y, *weights)
