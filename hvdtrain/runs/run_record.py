"""What the files of a run say about it, whichever of them are there."""

import dataclasses
import math
from pathlib import Path
from typing import Any

from hvdtrain.errors import DataError
from hvdtrain.runs.run_files import BENCH, PROVENANCE, RANK_TIMES, RunFiles, open_run_files
from hvdtrain.system.json_files import read_lines, read_object

FILES = ("summary.json", "metrics.jsonl", "config.json", RANK_TIMES, PROVENANCE, BENCH)
NOT_METRICS = ("event", "time", "step", "epoch", "samples", "elapsed_seconds")
"""Fields of a line of ``metrics.jsonl`` that are neither a loss nor a metric."""


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """A run, as far as its files describe it."""

    name: str
    """Its path or URL."""
    summary: dict[str, Any]
    config: dict[str, Any]
    events: list[dict[str, Any]]
    """The lines of ``metrics.jsonl``."""
    rank_times: list[dict[str, Any]]
    """The lines of ``ranks.jsonl``."""
    provenance: dict[str, Any]
    """What it is made with."""
    bench: dict[str, Any]
    """What ``bench`` measured; its folder may be read like a run."""

    def of_kind(self, event: str) -> list[dict[str, Any]]:
        """The lines of an event, in order."""
        return [each for each in self.events if each.get("event") == event]

    def last(self, event: str) -> dict[str, Any]:
        """The last line of an event; empty if there is none."""
        return next((each for each in reversed(self.events) if each.get("event") == event), {})

    def points(self, event: str, *names: str) -> list[list[float]]:
        """For each name, its values in the lines of an event that have a step and all of these numbers."""
        rows = []
        for each in self.of_kind(event):
            values = [number(each.get(name)) for name in names]
            if number(each.get("step")) is not None and None not in values:
                rows.append(values)
        return [list(column) for column in zip(*rows, strict=True)] if rows else [[] for _ in names]


def read_run(run_dir: str | Path) -> RunRecord:
    """Reads a run directory, or its URL; raises what :func:`read_files` raises."""
    with open_run_files(run_dir) as files:
        return read_files(files)


def read_files(files: RunFiles) -> RunRecord:
    """Reads the files of a run; those that are missing or damaged count as empty.

    Raises:
        DataError: there are none of them, or the object store cannot be read.
    """
    try:
        paths = {name: files.path_of(name) for name in FILES}
        if not any(path.exists() for path in paths.values()):
            raise DataError(
                f"RUN must be a run directory. Received: {files.name!r}, which has none of {', '.join(FILES)}."
            )
        return RunRecord(
            files.name,
            _object_in(paths["summary.json"]),
            _object_in(paths["config.json"]),
            _lines_of(paths["metrics.jsonl"]),
            _lines_of(paths[RANK_TIMES]),
            _object_in(paths[PROVENANCE]),
            _object_in(paths[BENCH]),
        )
    except ValueError as error:  # a null character
        raise DataError(f"RUN must be the folder of a run. Received: {files.name!r} ({error})") from error


def number(value: object) -> float | None:
    """A finite or infinite number; None for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number else None  # type: ignore[return-value]


def is_finite(value: object) -> bool:
    """Whether this is a number that a figure can show."""
    found = number(value)
    return found is not None and math.isfinite(found)


def _lines_of(path: Path) -> list[dict[str, Any]]:
    try:
        return read_lines(path)
    except OSError:
        return []


def _object_in(path: Path) -> dict[str, Any]:
    try:
        return read_object(path)
    except (OSError, ValueError):
        return {}
