"""What can be trained: a model, its data and its defaults, one file a built-in task."""

import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path

import keras

from hvdtrain.data import Arrays
from hvdtrain.errors import UsageError

BUILT_IN = ("digits",)


@dataclasses.dataclass(frozen=True)
class Data:
    """The samples of a task."""

    training: Arrays
    evaluation: Arrays


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A model with its data; numbers are the defaults of the flags with these names."""

    make_model: Callable[[], keras.Model]
    """Makes the model, built (its first layer has an ``Input``), not compiled."""
    read_data: Callable[[Path | None], Data]
    """Reads the data from ``--data-dir`` (None where it was not given)."""
    loss: Callable[[], keras.losses.Loss]
    metrics: Callable[[], list[keras.metrics.Metric]]
    optimizer: str = "adam"
    learning_rate: float = 1e-3
    batch_size: int = 32
    epochs: int = 10


def load_task(name: str) -> Task:
    """A built-in task by its name.

    Raises:
        UsageError: there is none of that name.
    """
    if name not in BUILT_IN:
        raise UsageError(f"--task must name a task: {', '.join(BUILT_IN)}. Received: {name!r}")
    return importlib.import_module(f"hvdtrain.tasks.{name}").TASK
