"""Logs a run to ``metrics.jsonl``, for programs to read."""

import errno
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.loggers.reporter import Reporter, RunShape
from hvdtrain.system.atomic_files import replaced_on_success, require_regular


class JsonLinesReporter(Reporter):
    """Appends one JSON object per event to a file."""

    def __init__(self, path: Path):
        self._path = path

    def started(self, facts: Mapping[str, Any], shape: RunShape) -> None:
        self._remove_lines_after(shape.resumed_step)
        self._append("start", facts)

    def resumed(self, step: int, path: Path) -> None:
        self._append("resume", {"step": step, "checkpoint": str(path)})

    def progressed(self, step: int, values: Mapping[str, float]) -> None:
        self._append("train", {"step": step, **values})

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        self._append("eval", {"step": step, **values})

    def warned(self, step: int, text: str) -> None:
        self._append("warning", {"step": step, "text": text})

    def finished(self, summary: Mapping[str, Any]) -> None:
        self._append("end", {"step": summary["steps"]})

    def _remove_lines_after(self, step: int) -> None:
        """Removes the lines of steps that will run, and be logged, again."""
        require_regular(self._path)
        if self._path.exists():
            lines = self._path.read_bytes().splitlines(keepends=True)
            with replaced_on_success(self._path) as aside:
                aside.write_bytes(b"".join(line for line in lines if _is_logged_by(line, step)))

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


def _is_logged_by(line: bytes, step: int) -> bool:
    """False also for a line that is not an event: the process may have been killed while writing it."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return False
    its_step = event.get("step", 0) if isinstance(event, dict) else None
    return isinstance(its_step, int | float) and its_step <= step
