"""For comparison: plain Keras in one process trains on the global batch, in the documented order of samples."""

import keras
import numpy as np
import tensorflow as tf


def train_alone(model: keras.Model, x, y, *, global_batch: int, seed: int, steps: int, shuffle: bool = True) -> None:
    # Keras' own step, traced once: with all variables, and for batches of any size.
    model.optimizer.build(model.trainable_variables)
    data = tuple(tf.constant(each, keras.config.floatx() if each.dtype.kind == "f" else None) for each in (x, y))
    signature = tuple(tf.TensorSpec([None, *each.shape[1:]], each.dtype) for each in data)
    train_step = tf.function(model.train_step, input_signature=[signature], autograph=False)
    step = epoch = 0
    while step < steps:
        order = np.arange(len(x))
        if shuffle:
            order = np.random.Generator(np.random.Philox([seed, epoch])).permutation(len(x))
        for first in range(0, len(x), global_batch):
            if step == steps:
                return
            batch = order[first : first + global_batch]
            train_step(tuple(tf.gather(each, batch) for each in data))
            step += 1
        epoch += 1
