"""Small models and data that the cases share."""

import keras
import numpy as np
from keras import layers

import hvdtrain

NUM_CLASSES = 4
# Cases run on any machine, also on one with fewer GPUs than ranks.
SHARED_GPUS = hvdtrain.GpuConfig(share_gpus=True)


def samples(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(count, 6)).astype(np.float32), rng.integers(0, NUM_CLASSES, count).astype(np.int32)


def dense_model(**options) -> keras.Model:
    keras.utils.set_random_seed(7)
    return keras.Sequential(
        [layers.Input((6,)), layers.Dense(8, activation="tanh", **options), layers.Dense(NUM_CLASSES)], name="dense"
    )


def loss() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def values(variables) -> list[np.ndarray]:
    return [variable.numpy() for variable in variables]


def relative_difference(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    """The largest difference of two elements, relative to the largest magnitude in their variable."""
    assert len(ours) == len(theirs)
    return max(float(np.max(np.abs(a - b)) / max(1e-12, np.max(np.abs(b)))) for a, b in zip(ours, theirs, strict=True))
