"""A run's model, rebuilt from its folder and one of its checkpoints."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import keras

from hvdtrain.checkpoint.checkpointer import Checkpointer, Restored
from hvdtrain.checkpoint.folders import newest_manifest
from hvdtrain.commands.building import local_data_dir, make_model, read_task
from hvdtrain.commands.config import RunConfig
from hvdtrain.config.fields import option_names, shown, with_options
from hvdtrain.data import Data, evaluation_dataset
from hvdtrain.data.preprocessed import preprocessed_data
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.optimizers import build_optimizer
from hvdtrain.errors import DataError, UsageError
from hvdtrain.fault_tolerance.collective_errors import on_every_rank, on_first_rank
from hvdtrain.runs.run_files import RunFiles
from hvdtrain.system.json_files import read_object
from hvdtrain.system.terminal import report
from hvdtrain.tasks.names import BUILT_IN
from hvdtrain.tasks.task import Task
from hvdtrain.training.tracing import build_by_tracing

_CONFIG = "config.json"


@dataclasses.dataclass(frozen=True)
class TrainedRun:
    """A run's configuration and its model, whose weights :meth:`load` restores."""

    config: RunConfig
    task: Task
    data: Data
    model: keras.Model
    checkpointer: Checkpointer

    def load(self, checkpoint: str | None = None) -> Restored:
        """Restores the weights of a checkpoint, by default the latest complete one, on every rank.

        Raises:
            JobError: there is none, with exit code 65.
        """
        return self.checkpointer.load(checkpoint)


def has_ended(summary: Path, step: int) -> bool:
    """Whether the run with this ``summary.json`` has ended, and this is its last step."""
    try:
        return bool(read_object(summary)["steps"] <= step)
    except (OSError, ValueError, LookupError, TypeError):
        return False


def open_run(files: RunFiles, task_name: str, data_dir: str | None, collectives: Collectives) -> TrainedRun:
    """Opens a run on every rank; rank 0 reads its files.

    Args:
        task_name: the value of ``--task``.
        data_dir: where the task's data are now; None: where they were.

    Raises:
        JobError: on every rank: the folder holds no run, or another user's run whose task was not named, or the task's
            data are missing.
    """
    values = on_first_rank(lambda: read_config(files, task_name), collectives)
    if data_dir is not None:
        values["data_dir"] = data_dir
    config = on_every_rank(lambda: _make_config(values, files.name), collectives)
    place = local_data_dir(config, collectives)
    task, data = on_every_rank(lambda: read_task(config, place), collectives)
    model = on_every_rank(lambda: make_model(config, task, data, collectives), collectives)
    data = preprocessed_data(data, model)
    build_by_tracing(model, (evaluation_dataset(data.training, 1, rank=0, size=1).element_spec, None))
    build_optimizer(model)
    checkpointer = Checkpointer(files.checkpoints, model, collectives=collectives)
    return TrainedRun(config, task, data, model, checkpointer)


def read_config(files: RunFiles, task_name: str) -> dict[str, Any]:
    """Reads config.json or, if it is damaged, the copy of it in the latest intact checkpoint.

    Args:
        task_name: the task that the user has named.

    Returns:
        The options of the run, by their flat names.

    Raises:
        DataError: there is neither, or they name a task of another user that ``task_name`` does not.
    """
    path = source = files.path_of(_CONFIG)
    try:
        values = read_object(path)
    except (OSError, ValueError) as error:
        found = newest_manifest(files.checkpoints)
        if found is None or not isinstance(found[1].get("config"), dict):
            raise DataError(
                f"--run-dir must be the folder of a run, with its config.json. Received: {files.name} ({error})"
            ) from error
        report(0, f"{files.name}/{_CONFIG} cannot be read ({error}): used the configuration in {found[0]}.")
        source, values = found[0], found[1]["config"]
    task = values.get("task")
    if task not in BUILT_IN and task != task_name:
        _require_trusted(files, source, task)
    known = option_names(RunConfig)
    return {name: value for name, value in values.items() if name in known}


def _require_trusted(files: RunFiles, source: Path, task: object) -> None:
    """Raises DataError if the task to run was chosen by another user.

    Args:
        source: the file that names it.
    """
    if not files.has_owner:
        owner, where = "may belong to another user", files.name
    elif others := {each.st_uid for each in (source.lstat(), source.stat())} - {os.geteuid()}:
        # Also if only the link to it belongs to somebody else.
        owner, where = f"belongs to user ID {min(others)}", str(source)
    else:
        return
    raise DataError(
        "the task of another user's run must be named, because its code is executed. Received: "
        f"{where}, which {owner} and names {shown(task)}. Read that code, then add --task {shown(task)}."
    )


def _make_config(values: dict[str, Any], name: str) -> RunConfig:
    try:
        return with_options(RunConfig(), values)
    except UsageError as error:
        raise DataError(
            f"config.json must hold the options of a run. Received: {name}/{_CONFIG}: {error}. Correct it, or "
            "delete it to use the configuration in the latest checkpoint."
        ) from error
