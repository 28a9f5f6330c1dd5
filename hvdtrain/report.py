"""What a run tells while it goes on: lines on the console, ``metrics.jsonl``; nothing off rank 0."""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO


class Reporter(Protocol):
    """Told by the trainer what happens; a part of the ranks' policy, so that the loop has none."""

    def started(self, facts: Mapping[str, Any]) -> None:
        """Once, before the first step."""

    def progressed(self, step: int, values: Mapping[str, float]) -> None:
        """At each log step: loss, metrics, speed."""

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """After each evaluation."""

    def finished(self, summary: Mapping[str, Any]) -> None:
        """Once, after the last step."""


class NullReporter:
    """Tells nothing: every rank but 0."""

    def started(self, facts: Mapping[str, Any]) -> None:
        pass

    def progressed(self, step: int, values: Mapping[str, float]) -> None:
        pass

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        pass

    def finished(self, summary: Mapping[str, Any]) -> None:
        pass


class ConsoleReporter:
    """A line per event."""

    def __init__(self, stream: TextIO | None = None):
        self._stream = stream or sys.stdout

    def _line(self, text: str) -> None:
        # One write: launchers tag and mix the output of ranks line by line.
        self._stream.write(text + "\n")
        self._stream.flush()

    def started(self, facts: Mapping[str, Any]) -> None:
        for name, value in facts.items():
            self._line(f"{name}: {value}")

    def progressed(self, step: int, values: Mapping[str, float]) -> None:
        clock = time.strftime("%H:%M:%S")
        self._line(f"{clock}  step {step}  {_values(values)}")

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        clock = time.strftime("%H:%M:%S")
        self._line(f"{clock}  step {step}  evaluation: {_values(values)}")

    def finished(self, summary: Mapping[str, Any]) -> None:
        self._line(
            f"done: {summary['steps']} steps on {summary['ranks']} rank(s) in {summary['wall_seconds']:.1f} s, "
            f"{summary['examples_per_second']:.0f} examples/s, step {summary['step_ms']['p50']:.2f} ms (p50) "
            f"{summary['step_ms']['p95']:.2f} ms (p95)"
        )
        self._line(f"evaluation: {_values(summary['eval'])}")
        self._line(f"weights_sha256: {summary['weights_sha256']} (equal on all ranks)")


class JsonLinesReporter:
    """A JSON object per event, appended to a file."""

    def __init__(self, path: Path):
        self._path = path

    def _append(self, event: str, values: Mapping[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"event": event, "time": time.time(), **values}) + "\n")

    def started(self, facts: Mapping[str, Any]) -> None:
        self._append("start", facts)

    def progressed(self, step: int, values: Mapping[str, float]) -> None:
        self._append("train", {"step": step, **values})

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        self._append("eval", {"step": step, **values})

    def finished(self, summary: Mapping[str, Any]) -> None:
        self._append("end", {"step": summary["steps"]})


class SeveralReporters:
    """Hands each event on, in order."""

    def __init__(self, reporters: Sequence[Reporter]):
        self._reporters = reporters

    def started(self, facts: Mapping[str, Any]) -> None:
        for reporter in self._reporters:
            reporter.started(facts)

    def progressed(self, step: int, values: Mapping[str, float]) -> None:
        for reporter in self._reporters:
            reporter.progressed(step, values)

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        for reporter in self._reporters:
            reporter.evaluated(step, values)

    def finished(self, summary: Mapping[str, Any]) -> None:
        for reporter in self._reporters:
            reporter.finished(summary)


def _values(values: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in values.items())
