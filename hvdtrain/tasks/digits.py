"""The digits task: handwritten digits of 8x8 pixels, which need no download."""

from pathlib import Path

import keras
import numpy as np
from keras import layers

from hvdtrain.data import Arrays, Data
from hvdtrain.tasks.handwritten_digits import load_digits
from hvdtrain.tasks.task import Task

NUM_TEST = 360
_SPLIT_SEED = 1998


def read_data(data_dir: Path | None) -> Data:
    """Returns 1,437 training and 360 test images in a fixed split. ``data_dir`` is ignored."""
    images, labels = load_digits()
    images = (images[..., np.newaxis] / 16).astype(np.float32)
    labels = labels.astype(np.int32)
    order = np.random.Generator(np.random.Philox(_SPLIT_SEED)).permutation(len(labels))
    test, training = order[:NUM_TEST], order[NUM_TEST:]
    return Data(Arrays(images[training], labels[training]), Arrays(images[test], labels[test]))


def make_model(data: Data | None = None) -> keras.Model:
    """Two convolutions and a dense layer, 38,866 parameters."""
    return keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(56, activation="relu"),
            layers.Dense(10),
        ],
        name="digits",
    )


TASK = Task(
    model=make_model,
    data=read_data,
    loss=lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=lambda: [keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
    optimizer="adam",
    defaults={"learning_rate": 2e-3, "batch_size": 32, "epochs": 24},
)
