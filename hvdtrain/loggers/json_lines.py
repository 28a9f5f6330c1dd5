"""Logs a run to ``metrics.jsonl``, for programs to read."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.loggers.event_file import EventFile
from hvdtrain.loggers.reporter import Reporter, RunShape


class JsonLinesReporter(Reporter):
    """Appends one JSON object per event to a file.

    Each has ``event`` and ``time``, the seconds since 1970. Those of training and evaluation have ``step``, loss and
    metrics, and in a run also:

    - ``epoch``: completed epochs, including the fraction of the current one.
    - ``samples``: samples trained on so far, over all ranks and epochs.
    - ``elapsed_seconds``: training time so far, including evaluations, saving and compiling. A resumed run continues
      from the value of the last line before the checkpoint: the time between two starts and the time of steps that were
      lost do not count.
    """

    def __init__(self, path: Path):
        self._file = EventFile(path)
        self._shape: RunShape | None = None
        self._start_s = 0.0

    def started(self, facts: Mapping[str, Any], shape: RunShape) -> None:
        self._shape = shape
        self._start_s = time.monotonic() - self._file.remove_after(shape.resumed_step)
        self._file.append("start", facts)

    def reshaped(self, shape: RunShape) -> None:
        self._shape = shape

    def resumed(self, step: int, path: Path) -> None:
        self._file.append("resume", {"step": step, "checkpoint": str(path)})

    def progressed(self, step: int, values: Mapping[str, float]) -> None:
        self._file.append("train", {**self._place(step), **values})

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        self._file.append("eval", {**self._place(step), **values})

    def members_changed(self, step: int, values: Mapping[str, float]) -> None:
        self._file.append("members", {**self._place(step), **values})

    def saved(self, step: int, values: Mapping[str, float]) -> None:
        self._file.append("checkpoint", {**self._place(step), **values})

    def warned(self, step: int, text: str) -> None:
        self._file.append("warning", {"step": step, "text": text})

    def finished(self, summary: Mapping[str, Any]) -> None:
        self._file.append("end", {"step": summary["steps"]})

    def _place(self, step: int) -> dict[str, float]:
        """A step's position in the run."""
        if self._shape is None:
            return {"step": step}
        return {
            "step": step,
            "epoch": self._shape.epochs(step),
            "samples": self._shape.samples(step),
            "elapsed_seconds": time.monotonic() - self._start_s,
        }
