"""The folder of a run. Rank 0 owns it; the other ranks hold one that writes nothing."""

import fcntl
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

import keras

from hvdtrain import process
from hvdtrain.checkpoint.folders import checkpoints_in, require_ours
from hvdtrain.errors import DataError
from hvdtrain.files import write_text
from hvdtrain.report import JsonLinesReporter, Reporter, SeveralReporters, TensorBoardReporter, console_reporter

_CONFIG, _SUMMARY, _MODEL, _LOCK = "config.json", "summary.json", "model.keras", ".lock"
_LOCK_WAIT_S = 10.0


class RunDirectory(Protocol):
    """Where a run writes."""

    @property
    def reporter(self) -> Reporter: ...

    @property
    def profile_folder(self) -> Path | None:
        """Where TensorFlow's profiler writes; None: not on this rank."""

    def claim(self, resume: str) -> None:
        """Makes the folder this job's."""

    def finished_run(self) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
        """Configuration and summary of the run that has ended here; None: there is none."""

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Keeps the configuration."""

    def finish(self, model: keras.Model, summary: Mapping[str, Any]) -> None:
        """Writes the model and the summary."""


class NoRunDirectory:
    """Writes nothing."""

    reporter = Reporter()
    profile_folder = None

    def claim(self, resume: str) -> None:
        pass

    def finished_run(self) -> None:
        return None

    def write_config(self, config: Mapping[str, Any]) -> None:
        pass

    def finish(self, model: keras.Model, summary: Mapping[str, Any]) -> None:
        pass


class OwnedRunDirectory:
    """A folder with the run's configuration, metrics, TensorBoard files, checkpoints, model and summary."""

    def __init__(self, path: Path):
        self._path = path
        self._lock: TextIO | None = None
        self.profile_folder: Path | None = path / "tensorboard"
        console = console_reporter(process.stdout_is_terminal())
        self.reporter: Reporter = SeveralReporters(
            [
                console,
                JsonLinesReporter(path / "metrics.jsonl"),
                TensorBoardReporter(path / "tensorboard", console),
            ]
        )

    def claim(self, resume: str) -> None:
        """Nothing that is there is touched.

        Args:
            resume: as of :class:`~hvdtrain.config.TrainConfig`.

        Raises:
            DataError: the path is a file, cannot be written, holds files that no run wrote, is another job's,
                holds a run with ``never`` or none with ``must``.
        """
        path = self._path
        try:
            holds_run = (path / _CONFIG).is_file() or bool(checkpoints_in(path / "checkpoints"))
            if path.is_dir() and not holds_run and {each.name for each in path.iterdir()} - {_LOCK}:
                raise DataError(
                    f"--run-dir must be a new folder, an empty one, or that of an earlier run. Received: {path}, which "
                    "holds something else. It was left untouched; give another folder."
                )
            require_ours(path / "checkpoints")
            if resume == "never" and holds_run:
                raise DataError(
                    f"--resume never needs a new folder. Received: {path}, which holds a run. It was left untouched; "
                    "give another --run-dir, or --resume auto to go on."
                )
            if resume == "must" and not checkpoints_in(path / "checkpoints"):
                raise DataError(f"--resume must needs a run with a checkpoint. Received: {path}, which holds none.")
            path.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(path / _LOCK)
        except OSError as error:
            raise DataError(
                f"--run-dir must be a folder that can be written. Received: {path} ({error}). Give another one."
            ) from error

    def finished_run(self) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
        if not (self._path / _SUMMARY).is_file():
            return None
        config, summary = (json.loads((self._path / name).read_text()) for name in (_CONFIG, _SUMMARY))
        return config, summary

    def write_config(self, config: Mapping[str, Any]) -> None:
        # An earlier, shorter run's: from here on it would tell of weights that are not the folder's.
        (self._path / _SUMMARY).unlink(missing_ok=True)
        write_text(self._path / _CONFIG, json.dumps(config, indent=2) + "\n")

    def finish(self, model: keras.Model, summary: Mapping[str, Any]) -> None:
        """Raises DataError where the file system refuses."""
        try:
            aside = self._path / ".writing.keras"
            model.save(aside)
            aside.rename(self._path / _MODEL)
            write_text(self._path / _SUMMARY, json.dumps(summary, indent=2) + "\n")
        except OSError as error:
            raise DataError(
                f"the trained model must be writable to {self._path}. Received: {error}. The last checkpoint is "
                "untouched; make room, and start the job again to write the model from it."
            ) from error


def _locked(path: Path) -> TextIO:
    """Holds a lock as long as this process lives, so that no two jobs write into one folder.

    A job that was ended may take a moment to be gone.
    """
    file = path.open("a")
    deadline_s = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise DataError(
                    f"--run-dir must be one job's alone. Received: {path.parent}, to which another job writes. Wait "
                    "for its end, or give another folder."
                ) from None
            time.sleep(0.1)
        except OSError:
            return file  # a file system without locks
        else:
            return file


def open_run_directory(rank: int, path: Path) -> RunDirectory:
    """The run directory of a rank."""
    return OwnedRunDirectory(path) if rank == 0 else NoRunDirectory()
