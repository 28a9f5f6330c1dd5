"""A task to start from: it trains as it is, on made-up samples.

One process:        python -m hvdtrain --task FILE
Several ranks:      hvdtrain launch --np 2 python -m hvdtrain --task FILE
With your data:     python -m hvdtrain --task FILE --data-dir DIR
All options:        python -m hvdtrain --help
"""

from pathlib import Path

import keras
import numpy as np

import hvdtrain
from hvdtrain.data import Arrays, Data


def read_data(data_dir: Path | None) -> Data:
    """Returns the training and evaluation samples: all of them on every rank, which reads its share.

    Args:
        data_dir: the value of --data-dir; None if it is not set.
    """
    if data_dir is None:
        x, y = make_up_samples(2000)
    else:
        # One file with the arrays x (a row for each sample) and y (its class, 0 or 1).
        with np.load(data_dir / "samples.npz") as file:
            x, y = file["x"].astype("float32"), file["y"]
    # The same order on every rank, because the seed is fixed.
    order = np.random.default_rng(0).permutation(len(x))
    evaluation, training = order[: len(x) // 5], order[len(x) // 5 :]
    # Instead of Arrays: TFRecords for files of records, Stream for a tf.data.Dataset, Batches for a PyDataset.
    return Data(Arrays(x[training], y[training]), Arrays(x[evaluation], y[evaluation]))


def make_up_samples(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Points in two interleaved half circles, and the half circle that each belongs to."""
    random = np.random.default_rng(0)
    y = random.integers(0, 2, count)
    angle = random.uniform(0, np.pi, count) + np.pi * y
    x = np.stack([np.cos(angle) + y, np.sin(angle) + 0.5 * y], axis=1)
    return (x + random.normal(0, 0.1, x.shape)).astype("float32"), y


def make_model(data: Data) -> keras.Model:
    """Returns the uncompiled model: hvdtrain compiles it with the loss, metrics and optimizer below.

    Args:
        data: what read_data returned.
    """
    return keras.Sequential(
        [
            keras.layers.Input((2,)),  # the shape of a sample
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )


TASK = hvdtrain.Task(
    model=make_model,
    data=read_data,
    loss="binary_crossentropy",  # the name of a Keras loss, or a function that returns one
    metrics=lambda: ["accuracy"],
    optimizer="adam",  # or a function that returns one: lambda: keras.optimizers.Adam(beta_2=0.99)
    # Keras callbacks, the same on every rank: callbacks=lambda: [keras.callbacks.EarlyStopping("val_loss")],
    # Any option of the command line; a flag or --config wins.
    defaults={"batch_size": 32, "epochs": 10, "learning_rate": 3e-3},
)
