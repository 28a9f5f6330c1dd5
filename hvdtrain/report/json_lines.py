"""``metrics.jsonl``: what happened, for programs to read."""

import errno
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.files import write_text
from hvdtrain.report.reporter import Reporter, RunShape


class JsonLinesReporter(Reporter):
    """A JSON object per event, appended to a file."""

    def __init__(self, path: Path):
        self._path = path

    def started(self, facts: Mapping[str, Any], shape: RunShape) -> None:
        self._append("start", facts)

    def resumed(self, step: int, path: Path) -> None:
        self._drop_lines_after(step)
        self._append("resume", {"step": step, "checkpoint": str(path)})

    def progressed(self, step: int, values: Mapping[str, float]) -> None:
        self._append("train", {"step": step, **values})

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        self._append("eval", {"step": step, **values})

    def warned(self, step: int, text: str) -> None:
        self._append("warning", {"step": step, "text": text})

    def finished(self, summary: Mapping[str, Any]) -> None:
        self._append("end", {"step": summary["steps"]})

    def _drop_lines_after(self, step: int) -> None:
        """Those steps are made again, and told again."""
        if self._path.exists():
            lines = self._path.read_text().splitlines(keepends=True)
            write_text(self._path, "".join(line for line in lines if _is_told_by(line, step)))

    def _append(self, event: str, values: Mapping[str, Any]) -> None:
        line = (json.dumps({"event": event, "time": time.time(), **values}) + "\n").encode()
        with self._path.open("ab", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            try:
                written = file.write(line)
                if written < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                file.truncate(size)  # half a line would spoil the next one too
                raise


def _is_told_by(line: str, step: int) -> bool:
    try:
        return int(json.loads(line).get("step", 0)) <= step
    except ValueError:
        return False  # half a line, of a process that was killed while it wrote
