"""What a task is: a few fields that a file of one's own fills in as the built-in ones do."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras

from hvdtrain.data import Source
from hvdtrain.errors import DataError, UsageError


@dataclasses.dataclass(frozen=True)
class Data:
    """The samples of a task."""

    training: Source
    evaluation: Source | None = None
    """None: nothing is evaluated."""
    num_classes: int | None = None
    """For ``model``, where only the data tell."""
    vocabulary: Sequence[str] = ()
    """Likewise: the words that numbers stand for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A model with its data, for ``--task``. Everything is made on every rank, and the same there.

    ::

        TASK = hvdtrain.Task(model=make_model, data=read_data, loss="mse", defaults={"epochs": 5})
    """

    model: Callable[[Data], keras.Model]
    """Makes the model, built (its first layer has an ``Input``), not compiled."""
    data: Callable[[Path | None], Data]
    """Reads the data from ``--data-dir`` (None where it was not given)."""
    loss: str | Callable[[], keras.losses.Loss]
    """A Keras loss by its name, or what makes it."""
    metrics: Callable[[], list[Any]] = list
    """Makes what ``compile`` takes as ``metrics``."""
    optimizer: str | Callable[[], keras.optimizers.Optimizer] = "adam"
    """As ``--optimizer``, or what makes it, with a number for its learning rate; flags change its settings."""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Of flags, by their names with underscores: ``{"batch_size": 128, "epochs": 10}``."""
    make_sample_data: Callable[[Path], None] | None = None
    """Writes small, learnable files of the task's format into a folder (``--make-sample-data``)."""

    def make_loss(self) -> Any:
        """What ``compile`` takes as ``loss``."""
        return self.loss if isinstance(self.loss, str) else self.loss()

    def make_model(self, data: Data) -> keras.Model:
        """Raises UsageError where the task's model is none, or is not built."""
        model = self.model(data)
        if not isinstance(model, keras.Model) or not model.built:
            raise UsageError(
                "a task's model(data) must return a keras.Model that is built: give its first layer an Input, or call "
                f"it once on a batch. Received: {model!r}"
            )
        return model

    def read_data(self, data_dir: Path | None) -> Data:
        """Raises UsageError where the task's data are none."""
        data = self.data(data_dir)
        if not isinstance(data, Data):
            raise UsageError(f"a task's data(data_dir) must return hvdtrain.tasks.Data. Received: {data!r}")
        return data


@dataclasses.dataclass(frozen=True)
class DataSet:
    """What a built-in task reads."""

    task: str
    name: str
    published: str | None = None
    """Where it can be had; None: it is the user's own."""

    def find(self, data_dir: Path | None, pattern: str, told: str | None = None) -> list[Path]:
        """The files below ``--data-dir`` that a pattern matches, sorted.

        Args:
            told: the pattern for people.

        Raises:
            DataError: there is none; tells where to get them, and how to do without.
        """
        found = [] if data_dir is None else sorted(path for path in data_dir.glob(pattern) if path.is_file())
        if not found:
            place = "no --data-dir" if data_dir is None else f"--data-dir {data_dir}, where there is none"
            known = f"{self.name}, published at {self.published}" if self.published else self.name
            raise DataError(
                f"--task {self.task} needs {told or pattern} in --data-dir. Received: {place}. It is {known}. To try "
                f"the task without it: python -m hvdtrain --task {self.task} --make-sample-data DIR, then "
                "--data-dir DIR."
            )
        return found
