"""``metrics.jsonl``: what happened, for programs to read."""

import json
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
            write_text(self._path, "".join(line for line in lines if _step(line) <= step))

    def _append(self, event: str, values: Mapping[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"event": event, "time": time.time(), **values}) + "\n")


def _step(line: str) -> int:
    try:
        return int(json.loads(line).get("step", 0))
    except ValueError:
        return 0  # half a line, of a process that was killed while it wrote
