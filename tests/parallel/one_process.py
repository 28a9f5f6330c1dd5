"""For comparison: plain Keras in one process trains on the global batch, in the documented order of samples."""

import keras
import numpy as np


def train_alone(model: keras.Model, x, y, *, global_batch: int, seed: int, steps: int, shuffle: bool = True) -> None:
    step = epoch = 0
    while step < steps:
        order = np.arange(len(x))
        if shuffle:
            order = np.random.Generator(np.random.Philox([seed, epoch])).permutation(len(x))
        for first in range(0, len(x), global_batch):
            if step == steps:
                return
            batch = order[first : first + global_batch]
            model.train_on_batch(x[batch], y[batch])
            step += 1
        epoch += 1
