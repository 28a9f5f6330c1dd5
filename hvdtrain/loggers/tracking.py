"""What reporters to experiment trackers (MLflow, Weights & Biases) have in common."""

import abc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hvdtrain.loggers.reporter import Reporter, RunShape


class TrackingReporter(Reporter, abc.ABC):
    """Logs options, training and evaluation values, and the summary to a run of a tracker.

    Names are ``train/loss``, ``eval/loss`` and so on. The tracker's run is noted in a file of the run directory: a
    resumed run continues it, and logs steps that were lost and repeated again. If a tracker fails, its log stops, and
    training continues.

    Args:
        run_dir: an existing folder, whose name becomes that of the tracker's run.
        config: the run's options by name.
    """

    tracker: str
    """The name of the tracker's library."""

    def __init__(self, run_dir: Path | str, config: Mapping[str, Any] | None = None):
        self._run_dir = Path(run_dir)
        self._config = dict(config or {})
        self._is_open = False

    def started(self, facts: Mapping[str, Any], shape: RunShape) -> None:
        note = self._run_dir / f"{self.tracker}-run.txt"
        known = note.read_text().strip() if note.is_file() else ""
        with self._os_errors():
            run_id = self._open(known or None)
        self._is_open = True
        note.write_text(f"{run_id}\n")

    def progressed(self, step: int, values: Mapping[str, float]) -> None:
        self._send("train", step, values)

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        self._send("eval", step, values)

    def members_changed(self, step: int, values: Mapping[str, float]) -> None:
        self._send("members", step, values)

    def finished(self, summary: Mapping[str, Any]) -> None:
        self._end(summary)

    def close(self) -> None:
        self._end(None)

    def _send(self, group: str, step: int, values: Mapping[str, float]) -> None:
        if self._is_open:
            with self._os_errors():
                self._log(step, {f"{group}/{name}": float(value) for name, value in values.items()})

    def _end(self, summary: Mapping[str, Any] | None) -> None:
        if self._is_open:
            self._is_open = False
            with self._os_errors():
                self._finish(summary)

    @contextmanager
    def _os_errors(self) -> Iterator[None]:
        """Trackers raise errors of many libraries; reporters that cannot write raise OSError."""
        try:
            yield
        except Exception as error:
            lines = str(error).splitlines() or [""]
            raise OSError(f"{type(error).__name__}: {lines[0]}") from error

    @abc.abstractmethod
    def _open(self, run_id: str | None) -> str:
        """Continues a run, or creates one; returns its identifier."""

    @abc.abstractmethod
    def _log(self, step: int, values: Mapping[str, float]) -> None:
        """Logs the values of a step."""

    @abc.abstractmethod
    def _finish(self, summary: Mapping[str, Any] | None) -> None:
        """Ends the run; without a summary, it has failed or was stopped."""
