"""Logs a run to ``metrics.jsonl``, for programs to read."""

import errno
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.loggers.reporter import Reporter, RunShape
from hvdtrain.system import bounded_files
from hvdtrain.system.atomic_files import replaced_on_success, require_regular
from hvdtrain.system.json_files import object_in


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
        self._path = path
        self._shape: RunShape | None = None
        self._start_s = 0.0

    def started(self, facts: Mapping[str, Any], shape: RunShape) -> None:
        self._shape = shape
        self._start_s = time.monotonic() - self._remove_lines_after(shape.resumed_step)
        self._append("start", facts)

    def reshaped(self, shape: RunShape) -> None:
        self._shape = shape

    def resumed(self, step: int, path: Path) -> None:
        self._append("resume", {"step": step, "checkpoint": str(path)})

    def progressed(self, step: int, values: Mapping[str, float]) -> None:
        self._append("train", {**self._place(step), **values})

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        self._append("eval", {**self._place(step), **values})

    def members_changed(self, step: int, values: Mapping[str, float]) -> None:
        self._append("members", {**self._place(step), **values})

    def warned(self, step: int, text: str) -> None:
        self._append("warning", {"step": step, "text": text})

    def finished(self, summary: Mapping[str, Any]) -> None:
        self._append("end", {"step": summary["steps"]})

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

    def _remove_lines_after(self, step: int) -> float:
        """Removes the lines of steps that will run, and be logged, again; returns the seconds elapsed before them."""
        require_regular(self._path)
        if not self._path.exists():
            return 0.0
        lines = bounded_files.read_lines(self._path)
        # A line that is not an object is incomplete: its process was killed while writing it.
        events = [(line, event) for line in lines if (event := object_in(line)) is not None and _is_up_to(event, step)]
        with replaced_on_success(self._path) as aside:
            aside.write_bytes(b"".join(line for line, _ in events))
        elapsed = [event.get("elapsed_seconds") for _, event in events]
        return max((value for value in elapsed if isinstance(value, int | float) and math.isfinite(value)), default=0.0)

    def _append(self, event: str, values: Mapping[str, Any]) -> None:
        line = (json.dumps({"event": event, "time": time.time(), **values}) + "\n").encode()
        require_regular(self._path)
        with self._path.open("ab", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            try:
                written = file.write(line)
                if written < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                file.truncate(size)  # a partial line would corrupt the next one too
                raise


def _is_up_to(event: Mapping[str, Any], step: int) -> bool:
    its_step = event.get("step", 0)
    return isinstance(its_step, int | float) and its_step <= step
