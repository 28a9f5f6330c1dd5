"""The folder of a run. Rank 0 owns it; the other ranks hold one that writes nothing."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import keras

from hvdtrain import process
from hvdtrain.checkpoint import write_checkpoint, write_text
from hvdtrain.errors import DataError
from hvdtrain.replicas import weights_sha256
from hvdtrain.report import JsonLinesReporter, Reporter, SeveralReporters, TensorBoardReporter, console_reporter

CONFIG_FILE = "config.json"


class RunDirectory(Protocol):
    """Where a run writes."""

    @property
    def reporter(self) -> Reporter: ...

    @property
    def profile_folder(self) -> Path | None:
        """Where TensorFlow's profiler writes; None: not on this rank."""

    def start(self, config: Mapping[str, Any]) -> None:
        """Makes the folder ready and keeps the configuration in it."""

    def write_checkpoint(self, model: keras.Model, step: int) -> None:
        """Writes the model's weights and its optimizer's state."""

    def finish(self, model: keras.Model, summary: Mapping[str, Any]) -> None:
        """Writes the model and the summary."""


class NoRunDirectory:
    """Writes nothing."""

    reporter = Reporter()
    profile_folder = None

    def start(self, config: Mapping[str, Any]) -> None:
        pass

    def write_checkpoint(self, model: keras.Model, step: int) -> None:
        pass

    def finish(self, model: keras.Model, summary: Mapping[str, Any]) -> None:
        pass


class OwnedRunDirectory:
    """A folder with the run's configuration, metrics, TensorBoard files, checkpoints, model and summary."""

    def __init__(self, path: Path):
        self._path = path
        self.profile_folder: Path | None = path / "tensorboard"
        console = console_reporter(process.stdout_is_terminal())
        self.reporter: Reporter = SeveralReporters(
            [
                console,
                JsonLinesReporter(path / "metrics.jsonl"),
                TensorBoardReporter(path / "tensorboard", console),
            ]
        )

    def start(self, config: Mapping[str, Any]) -> None:
        """An earlier run in this place is moved aside, never overwritten.

        Raises:
            DataError: the path is a file, cannot be written, or holds files that no run wrote.
        """
        try:
            moved = _move_earlier_run(self._path)
            self._path.mkdir(parents=True, exist_ok=True)
            write_text(self._path / CONFIG_FILE, json.dumps(config, indent=2) + "\n")
        except OSError as error:
            raise DataError(
                f"--run-dir must be a folder that can be written. Received: {self._path} ({error}). Give another one."
            ) from error
        if moved is not None:
            self.reporter.warned(0, f"{self._path} held an earlier run, which was moved to {moved}")

    def write_checkpoint(self, model: keras.Model, step: int) -> None:
        facts = {"step": step, "weights_sha256": weights_sha256(model)}
        write_checkpoint(self._path / "checkpoints", model, facts)

    def finish(self, model: keras.Model, summary: Mapping[str, Any]) -> None:
        aside = self._path / ".writing.keras"
        model.save(aside)
        aside.rename(self._path / "model.keras")
        write_text(self._path / "summary.json", json.dumps(summary, indent=2) + "\n")


def _move_earlier_run(path: Path) -> Path | None:
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return None
    if not (path / CONFIG_FILE).is_file():
        raise DataError(
            f"--run-dir must be a new folder, an empty one, or that of an earlier run. Received: {path}, which holds "
            "something else. It was left untouched; give another folder."
        )
    number = 1
    while (target := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return path.rename(target)


def open_run_directory(rank: int, path: Path) -> RunDirectory:
    """The run directory of a rank."""
    return OwnedRunDirectory(path) if rank == 0 else NoRunDirectory()
