"""A small model and its checkpoints, for the tests of checkpoints on one rank."""

from pathlib import Path

import keras
import numpy as np
from keras import layers

from hvdtrain.checkpoint.checkpointer import Checkpointer
from hvdtrain.distributed.single_process import SingleProcessCollectives

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(16, 3)).astype(np.float32), RNG.normal(size=(16, 2)).astype(np.float32)


def make(units: int = 4, optimizer=None) -> keras.Model:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [layers.Input((3,)), layers.Dense(units), layers.BatchNormalization(), layers.Dropout(0.5), layers.Dense(2)]
    )
    model.compile(optimizer=optimizer or keras.optimizers.Adam(0.01), loss="mse", metrics=["mae"], run_eagerly=True)
    model.train_on_batch(X, Y)
    return model


def checkpointer(folder: Path, model=None, **options) -> Checkpointer:
    return Checkpointer(folder, model or make(), collectives=SingleProcessCollectives(), **options)


def all_values(model) -> list[np.ndarray]:
    return [variable.numpy() for variable in [*model.variables, *model.optimizer.variables]]


def same(one, other) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def names_in(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())
