"""``metrics.jsonl``: what happened, for programs to read."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.report.reporter import Reporter, RunShape


class JsonLinesReporter(Reporter):
    """A JSON object per event, appended to a file."""

    def __init__(self, path: Path):
        self._path = path

    def started(self, facts: Mapping[str, Any], shape: RunShape) -> None:
        self._append("start", facts)

    def progressed(self, step: int, values: Mapping[str, float]) -> None:
        self._append("train", {"step": step, **values})

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        self._append("eval", {"step": step, **values})

    def warned(self, step: int, text: str) -> None:
        self._append("warning", {"step": step, "text": text})

    def finished(self, summary: Mapping[str, Any]) -> None:
        self._append("end", {"step": summary["steps"]})

    def _append(self, event: str, values: Mapping[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"event": event, "time": time.time(), **values}) + "\n")
