"""A run's model, made again from its folder and one of its checkpoints."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import keras

from hvdtrain import runtime
from hvdtrain.building import make_model
from hvdtrain.checkpoint import Checkpointer, Restored
from hvdtrain.config import TrainConfig, options
from hvdtrain.errors import DataError
from hvdtrain.failure import on_every_rank, on_first_rank
from hvdtrain.tasks import Data, Task, load_task, short_name


@dataclasses.dataclass(frozen=True)
class TrainedRun:
    """What a run was asked for, and its model, whose weights :meth:`load` puts in."""

    config: TrainConfig
    task: Task
    data: Data
    model: keras.Model
    checkpointer: Checkpointer

    def load(self, checkpoint: str | None = None) -> Restored:
        """Puts the weights of a checkpoint, by default the latest whole one, into the model on every rank.

        Raises:
            JobError: there is none, with exit code 65.
        """
        return self.checkpointer.load(checkpoint)


def run_folder(run_dir: str | None, task: str) -> Path:
    """Where a run of a task is, or is to be."""
    return Path(run_dir or f"runs/{short_name(task)}")


def has_ended(folder: Path, step: int) -> bool:
    """Whether the run in this folder has made its last step, and this is it."""
    try:
        summary = json.loads((folder / "summary.json").read_text())
    except (OSError, ValueError):
        return False
    return bool(summary["steps"] <= step)


def open_run(folder: Path, data_dir: str | None) -> TrainedRun:
    """Opens a run on every rank; rank 0 reads its folder.

    Args:
        data_dir: where the task's data are now; None: where they were.

    Raises:
        JobError: on every rank: the folder holds no run, or the task's data are not there.
    """
    collectives = runtime.current().collectives
    values = on_first_rank(lambda: _read_config(folder), collectives)
    config = TrainConfig(**values)
    if data_dir is not None:
        config = dataclasses.replace(config, data_dir=data_dir)

    def make() -> tuple[Task, Data]:
        task = load_task(config.task)
        return task, task.read_data(Path(config.data_dir) if config.data_dir else None)

    task, data = on_every_rank(make, collectives)
    model = on_every_rank(lambda: make_model(config, task, data), collectives)
    model.optimizer.build(model.trainable_variables)
    return TrainedRun(config, task, data, model, Checkpointer(folder / "checkpoints", model))


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        values = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise DataError(
            f"--run-dir must be the folder of a run, with its config.json. Received: {folder} ({error})"
        ) from error
    known = {field.name for field in options(TrainConfig)}
    return {name: value for name, value in values.items() if name in known}
