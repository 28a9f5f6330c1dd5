"""Logs a run to CSV files, for spreadsheets and pandas."""

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.loggers.reporter import Reporter, RunShape
from hvdtrain.system.atomic_files import replaced_on_success, require_regular


class CsvReporter(Reporter):
    """Writes ``train.csv`` and ``eval.csv``, a row for each log step and each evaluation, with a column for each value.

    A resumed run removes the rows of steps that will be logged again.

    Args:
        folder: where to write, for instance the run directory.
    """

    def __init__(self, folder: Path | str):
        self._tables = {name: _Table(Path(folder) / f"{name}.csv") for name in ("train", "eval")}

    def started(self, facts: Mapping[str, Any], shape: RunShape) -> None:
        for table in self._tables.values():
            table.open(shape.resumed_step)

    def progressed(self, step: int, values: Mapping[str, float]) -> None:
        self._tables["train"].append({"step": step, **values})

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        self._tables["eval"].append({"step": step, **values})


class _Table:
    """A CSV file that gains a column for each new name."""

    def __init__(self, path: Path):
        self._path = path
        self._columns: list[str] = []

    def open(self, last_step: int) -> None:
        """Keeps the rows of an existing file up to a step."""
        require_regular(self._path)
        if self._path.exists():
            rows = [row for row in self._rows() if _step_of(row) <= last_step]
            self._write(rows)

    def append(self, row: Mapping[str, Any]) -> None:
        added = [name for name in row if name not in self._columns]
        if added:
            rows = self._rows() if self._path.exists() else []
            self._columns += added
            self._write([*rows, row])
        else:
            with self._path.open("a", newline="") as file:
                file.write(_text(self._columns, [row]))

    def _rows(self) -> list[dict[str, Any]]:
        with self._path.open(newline="", errors="replace") as file:
            reader = csv.DictReader(file)
            rows = [{name: value for name, value in row.items() if name is not None} for row in reader]
            self._columns = list(reader.fieldnames or [])
        return rows

    def _write(self, rows: list[Any]) -> None:
        with replaced_on_success(self._path) as aside:
            aside.write_text(_text(self._columns, rows, header=True), newline="")


def _text(columns: list[str], rows: list[Any], *, header: bool = False) -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, restval="", extrasaction="ignore")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _step_of(row: Mapping[str, Any]) -> float:
    """Infinite for a row that was cut off, so that it is removed."""
    if None in row.values():
        return float("inf")
    try:
        return int(row["step"])
    except (KeyError, TypeError, ValueError):
        return float("inf")
