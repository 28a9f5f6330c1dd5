"""The data that the programs train on, and the loss of those that classify."""

import numpy as np
from keras import losses

NUM_SAMPLES = 96
CLASSES = 5
LENGTH, WORDS = 8, 20

RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(NUM_SAMPLES, 8, 8, 3)).astype(np.float32)
FEATURES = RNG.normal(size=(NUM_SAMPLES, 6)).astype(np.float32)
LABELS = RNG.integers(0, CLASSES, NUM_SAMPLES).astype(np.int32)
TARGETS = (FEATURES @ RNG.normal(size=(6, 2))).astype(np.float32)
LENGTHS = 1 + RNG.integers(0, LENGTH, NUM_SAMPLES)
IS_WORD = np.arange(LENGTH) < LENGTHS[:, None]
TEXT = np.where(IS_WORD, RNG.integers(1, WORDS, (NUM_SAMPLES, LENGTH)), 0).astype(np.int32)
SERIES = np.where(IS_WORD[..., None], RNG.normal(size=(NUM_SAMPLES, LENGTH, 3)), 0).astype(np.float32)
PIXEL_LABELS = RNG.integers(-1, CLASSES, (NUM_SAMPLES, 8, 8)).astype(np.int32)


def cross_entropy(**options):
    return losses.SparseCategoricalCrossentropy(from_logits=True, **options)
