"""The folder of a run. Rank 0 owns it; the other ranks hold one that writes nothing."""

import fcntl
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

import keras

from hvdtrain.checkpoint.storage import checkpoints_in, require_ours
from hvdtrain.commands.config import RunConfig
from hvdtrain.commands.run_store import RunStore
from hvdtrain.config.fields import as_dict
from hvdtrain.errors import DataError
from hvdtrain.loggers.json_lines import JsonLinesReporter
from hvdtrain.loggers.names import logger_names, make_loggers
from hvdtrain.loggers.progress_bar import console_reporter
from hvdtrain.loggers.rank_times import RankTimesReporter
from hvdtrain.loggers.reporter import CompositeReporter, Reporter
from hvdtrain.loggers.tensorboard import TensorBoardReporter
from hvdtrain.runs.run_files import PROVENANCE, RANK_TIMES, checkpoints_of
from hvdtrain.stores.urls import is_url, local_path
from hvdtrain.system import environment, error_text
from hvdtrain.system.atomic_files import is_temporary, remove, replaced_on_success, require_regular, write_text
from hvdtrain.system.json_files import read_object
from hvdtrain.system.terminal import report, stdout_is_terminal
from hvdtrain.tasks.task import Task

_CONFIG, _SUMMARY, _MODEL, _LOCK = "config.json", "summary.json", "model.keras", ".lock"
_WEIGHTS = "model.weights.h5"
LOCK_TIMEOUT_S = 10.0
# A job that lost its launcher may still be saving when launch/run --restarts starts it again.
_LOCK_TIMEOUT_RESTARTED_S = 300.0


class RunDirectory(Protocol):
    """Where a run writes."""

    writes: bool
    """Whether this process writes to it: rank 0 does."""

    @property
    def name(self) -> str:
        """The path, or the URL in an object store."""

    @property
    def path(self) -> Path:
        """The folder, or the local copy of the one in an object store."""

    @property
    def checkpoints(self) -> str | Path:
        """The path or URL of the checkpoints."""

    @property
    def reporter(self) -> Reporter: ...

    def add_reporters(self, task: Task, config: RunConfig) -> None:
        """Adds the loggers that the configuration names, and the task's own reporters."""

    def claim(self, resume: str) -> None:
        """Claims the folder for this job."""

    def finished_run(self) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
        """Configuration and summary of a completed run in this folder; None if there is none."""

    def write_config(self, config: Mapping[str, Any], made_with: Mapping[str, Any] | None = None) -> None:
        """Writes the configuration, and what the run is made with."""

    def finish(self, model: keras.Model | None, summary: Mapping[str, Any]) -> None:
        """Writes the model, if it can be saved, and the summary."""

    def publish(self) -> None:
        """Uploads changed files other than checkpoints, if the run is in an object store; raises OSError on failure."""

    def publish_logs(self) -> None:
        """Uploads new log lines; prints a message on failure."""


class NoRunDirectory:
    """Writes nothing."""

    writes = False
    reporter = Reporter()

    def __init__(self, run_dir: str | Path):
        self.name = str(run_dir)
        self.path = _local(run_dir)
        self.checkpoints = checkpoints_of(run_dir)

    def add_reporters(self, task: Task, config: RunConfig) -> None:
        pass

    def claim(self, resume: str) -> None:
        pass

    def finished_run(self) -> None:
        return None

    def write_config(self, config: Mapping[str, Any], made_with: Mapping[str, Any] | None = None) -> None:
        pass

    def finish(self, model: keras.Model | None, summary: Mapping[str, Any]) -> None:
        pass

    def publish(self) -> None:
        pass

    def publish_logs(self) -> None:
        pass


class OwnedRunDirectory:
    """A folder with the run's configuration, metrics, TensorBoard files, checkpoints, model and summary.

    For a URL, files are written to a local folder and copied to the object store.
    """

    writes = True

    def __init__(self, run_dir: str | Path, *, prints_every_line: bool = True):
        self.name = str(run_dir)
        self.path = path = _local(run_dir)
        self.checkpoints = checkpoints_of(run_dir)
        self._store = RunStore(str(run_dir), path, but=(_LOCK,)) if is_url(run_dir) else None
        self._lock: TextIO | None = None
        self._is_claimed = False
        self._config: Mapping[str, Any] | None = None
        console = console_reporter(stdout_is_terminal(), prints_every_line=prints_every_line)
        self._reporters = [
            console,
            JsonLinesReporter(path / "metrics.jsonl"),
            RankTimesReporter(path / RANK_TIMES),
            TensorBoardReporter(path / "tensorboard", console),
        ]
        self.reporter: Reporter = CompositeReporter(self._reporters)

    def add_reporters(self, task: Task, config: RunConfig) -> None:
        self._reporters += make_loggers(logger_names(config.training.logging.loggers), self.path, as_dict(config))
        self._reporters += task.make_reporters(self.path)

    def claim(self, resume: str) -> None:
        """Locks the folder; changes nothing in it, unless it is the local copy of one in an object store.

        Args:
            resume: see :class:`~hvdtrain.checkpoint.config.CheckpointConfig`.

        Raises:
            DataError: the path is a file, cannot be written, holds files that no run wrote, is in use by another
                job, holds a run with ``never`` or none with ``must``.
        """
        path = self.path
        try:
            if self._store is not None:
                self._lock = self._make_and_lock()
                self._store.fetch()
            holds_run = (path / _CONFIG).is_file() or bool(checkpoints_in(path / "checkpoints"))
            if path.is_dir() and not holds_run and any(not _is_left_by_start(each) for each in path.iterdir()):
                raise DataError(
                    f"--run-dir must be a new folder, an empty one, or that of an earlier run. Received: {self.name}, "
                    "which holds something else. It was left untouched; use another folder."
                )
            require_ours(path / "checkpoints")
            if resume == "never" and holds_run:
                raise DataError(
                    f"--resume never needs a new folder. Received: {self.name}, which holds a run. It was left "
                    "untouched; use another --run-dir, or --resume auto to resume."
                )
            if resume == "must" and not checkpoints_in(path / "checkpoints"):
                raise DataError(
                    f"--resume must needs a run with a checkpoint. Received: {self.name}, which holds none. "
                    "Use the --run-dir of that run, or --resume auto to start a new one."
                )
            self._lock = self._lock or self._make_and_lock()
            self._is_claimed = True
        except OSError as error:
            raise DataError(
                f"--run-dir must be a folder that can be written. Received: {self.name} ({error}). Use another one."
            ) from error

    def finished_run(self) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
        if not (self.path / _SUMMARY).exists():
            return None
        name = _SUMMARY
        try:
            summary = read_object(self.path / _SUMMARY)
            if not isinstance(summary.get("steps"), int):
                raise ValueError(f"steps must be a whole number, not {summary.get('steps')!r:.40}")
            name = _CONFIG
            return read_object(self.path / _CONFIG), summary
        except (OSError, ValueError) as error:
            # The last checkpoint has all that is needed to write both files again.
            report(0, f"{self.path / name} cannot be read ({error}); treating the run as incomplete.")
            return None

    def write_config(self, config: Mapping[str, Any], made_with: Mapping[str, Any] | None = None) -> None:
        """Raises DataError if the files cannot be written."""
        self._config = config
        try:
            # The summary of an earlier, shorter run would no longer describe the weights in the folder.
            remove(self.path / _SUMMARY)
            if self._store is not None:
                self._store.delete(_SUMMARY)
            _write_object(self.path / _CONFIG, config)
            if made_with is not None:
                _write_object(self.path / PROVENANCE, made_with)
            self.publish()
        except OSError as error:
            raise DataError(
                f"--run-dir must be a folder that can be written. Received: {self.name} ({error}). Free some space or "
                "change its permissions, and start the job again, or use another folder."
            ) from error

    def finish(self, model: keras.Model | None, summary: Mapping[str, Any]) -> None:
        """Raises DataError if the files cannot be written."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if self._config is not None and not (self.path / _CONFIG).exists():  # The folder was deleted meanwhile.
                _write_object(self.path / _CONFIG, self._config)
            if model is not None:
                self._save(model)
            _write_object(self.path / _SUMMARY, summary)
            self.publish()
        except OSError as error:
            raise DataError(
                f"the trained model must be writable to {self.name}. Received: {error}. The last checkpoint is "
                "untouched; free some space, and restart the job to write the model from it."
            ) from error

    def _save(self, model: keras.Model) -> None:
        try:
            with replaced_on_success(self.path / _MODEL) as aside:
                model.save(aside)
        except OSError:
            raise
        except Exception as error:  # A class of the user's that Keras cannot save: each has an error of its own.
            with replaced_on_success(self.path / _WEIGHTS) as aside:
                model.save_weights(aside)
            report(
                0,
                f"Keras cannot save this model ({type(model).__name__}) as {_MODEL}. Its weights are in "
                f"{self.path / _WEIGHTS}. Keras' reason: {error_text.message(error)}",
            )

    def publish(self) -> None:
        if self._store is not None:
            self._store.publish(last=_SUMMARY)

    def publish_logs(self) -> None:
        try:
            # Another job may have taken over: this one ends because of it.
            if self._is_claimed and self._store is not None and self._store.is_ours():
                self.publish()
        except OSError as error:
            report(0, f"the last lines of the run's logs could not be uploaded: {error}. They are in {self.path}.")

    def _make_and_lock(self) -> TextIO:
        self.path.mkdir(parents=True, exist_ok=True)
        return _locked(self.path / _LOCK)


def _write_object(path: Path, content: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=2) + "\n")


def _is_left_by_start(path: Path) -> bool:
    """Whether a path was left by a start that failed before ``config.json`` was written."""
    return path.name == _LOCK or is_temporary(path)


def _locked(path: Path) -> TextIO:
    """Locks the folder until this process ends, so that no two jobs write to it.

    A job that was killed may take a moment to end.
    """
    require_regular(path)
    file = path.open("a")
    timeout_s = _LOCK_TIMEOUT_RESTARTED_S if environment.restart_number() else LOCK_TIMEOUT_S
    deadline_s = time.monotonic() + timeout_s
    has_reported = False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise DataError(
                    f"--run-dir must be used by one job at a time. Received: {path.parent}, to which another job "
                    f"has been writing for {timeout_s:g} s. Wait for its end, or use another folder."
                ) from None
            if not has_reported:
                report(0, f"another job writes to {path.parent}; waiting up to {timeout_s:g} s for its end.")
                has_reported = True
            time.sleep(0.1)
        except OSError:
            return file  # a file system without locks
        else:
            return file


def open_run_directory(rank: int, run_dir: str | Path, *, prints_every_line: bool = True) -> RunDirectory:
    """The run directory of a rank; see :func:`~hvdtrain.loggers.progress_bar.console_reporter`."""
    if rank != 0:
        return NoRunDirectory(run_dir)
    return OwnedRunDirectory(run_dir, prints_every_line=prints_every_line)


def _local(run_dir: str | Path) -> Path:
    return local_path("runs", str(run_dir)) if is_url(run_dir) else Path(run_dir)
