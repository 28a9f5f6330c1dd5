"""``hvdtrain compare``: a table of runs, and a figure of their losses; reads whatever files each run has."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvdtrain.commands.figures import NO_FIGURE, make_figure
from hvdtrain.commands.run_files import open_run_files
from hvdtrain.commands.tables import aligned
from hvdtrain.errors import DataError, UsageError
from hvdtrain.stores.urls import is_url, require_usable
from hvdtrain.system.json_files import read_lines, read_object

_FILES = ("summary.json", "metrics.jsonl", "config.json")
_FIGURES = (".png", ".svg", ".pdf")
_NONE = "-"
# Fields of a line of metrics.jsonl that are neither a loss nor a metric.
_NOT_METRICS = ("event", "time", "step", "epoch", "samples", "elapsed_seconds")


@dataclasses.dataclass(frozen=True)
class Run:
    """A run, as far as its files describe it."""

    name: str
    """Its path or URL."""
    summary: dict[str, Any]
    config: dict[str, Any]
    events: list[dict[str, Any]]

    def row(self) -> dict[str, str]:
        """The cells of the table by column; columns without a value are left out."""
        train, evaluation = self._last("train"), self._last("eval")
        evaluated = self.summary.get("eval") or {
            name: value for name, value in evaluation.items() if name not in _NOT_METRICS
        }
        steps = _number(self.summary.get("steps", train.get("step")))
        seconds = [_number(event.get("elapsed_seconds")) for event in self.events]
        wall_s = max((each for each in seconds if each is not None), default=_number(self.summary.get("wall_seconds")))
        speed = _number(self.summary.get("examples_per_second", train.get("examples/s")))
        share = _number(self.summary.get("communication_fraction"))
        cells = {
            "run": self.name,
            "task": self._fact("task"),
            "mode": self._fact("mode"),
            "ranks": _shown(_number(self.summary.get("ranks")), "d"),
            "steps": _shown(steps, "d") + ("" if self.summary else " (unfinished)"),
            "loss": _shown(_number(self.summary.get("loss", train.get("loss"))), ".4g"),
            **{f"eval {name}": _shown(_number(value), ".4g") for name, value in dict(evaluated).items()},
            "examples/s": _shown(speed, ".0f"),
            "time": _NONE if wall_s is None else f"{wall_s:.1f} s",
            "communication": _NONE if share is None else f"{100 * share:.0f} %",
        }
        return {name: cell for name, cell in cells.items() if cell != _NONE}

    def curve(self, event: str) -> tuple[list[float], list[float], list[float]]:
        """Steps, seconds and losses of the lines of an event that have a loss."""
        points = []
        for each in self.events:
            step, loss, elapsed_s = (_number(each.get(name)) for name in ("step", "loss", "elapsed_seconds"))
            if each.get("event") == event and step is not None and loss is not None:
                points.append((step, math.nan if elapsed_s is None else elapsed_s, loss))
        return [each[0] for each in points], [each[1] for each in points], [each[2] for each in points]

    def _last(self, event: str) -> dict[str, Any]:
        return next((each for each in reversed(self.events) if each.get("event") == event), {})

    def _fact(self, name: str) -> str:
        value = self.summary.get(name, self.config.get(name))
        return value if isinstance(value, str) else _NONE


def run(runs: Sequence[str], plot: Path | None = None) -> int:
    """Prints the table and draws the figure.

    Raises:
        UsageError: no run is named, or the format of the figure is not supported.
        DataError: a folder holds no run, or the figure cannot be written.
    """
    if not runs:
        raise UsageError("RUN is missing. For example: hvdtrain compare runs/digits runs/cifar10")
    if plot is not None and plot.suffix not in _FIGURES:
        raise UsageError(f"--plot must end in {', '.join(_FIGURES)}. Received: {str(plot)!r}")
    for each in runs:
        if is_url(each):
            require_usable("RUN", each)
    found = [read_run(path) for path in runs]
    print(table([each.row() for each in found]), flush=True)
    if plot is not None:
        print(f"written: {plot}" if draw(found, plot) else NO_FIGURE.format(plot), flush=True)
    return 0


def read_run(run_dir: str | Path) -> Run:
    """Reads a run directory, or its URL; files that are missing or damaged count as empty.

    Raises:
        DataError: it holds none of them, or the object store cannot be read.
    """
    with open_run_files(run_dir) as files:
        try:
            paths = {name: files.path_of(name) for name in _FILES}
            if not any(path.exists() for path in paths.values()):
                raise DataError(
                    f"RUN must be a run directory. Received: {files.name!r}, which has none of {', '.join(_FILES)}."
                )
            events = _read(paths["metrics.jsonl"])
        except ValueError as error:  # a null character
            raise DataError(f"RUN must be the folder of a run. Received: {files.name!r} ({error})") from error
        return Run(files.name, _read_object(paths["summary.json"]), _read_object(paths["config.json"]), events)


def table(rows: Sequence[dict[str, str]]) -> str:
    """Formats rows; a column that no row has is left out."""
    last = ("examples/s", "time", "communication")
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in last]
    names += [name for name in last if any(name in row for row in rows)]
    return "\n".join(aligned([names, *([row.get(name, _NONE) for name in names] for row in rows)]))


def draw(runs: Sequence[Run], path: Path) -> bool:
    """Plots the losses against steps and time; returns False if matplotlib is missing.

    Raises:
        DataError: the file cannot be written.
    """
    figure = make_figure(figsize=(10, 4), layout="constrained")
    if figure is None:
        return False
    by_step, by_time = figure.subplots(1, 2, sharey=True)
    losses: list[float] = []
    for i, each in enumerate(runs):
        for event, style in (("train", "-"), ("eval", "--")):
            steps, seconds, values = each.curve(event)
            losses += values
            label = f"{each.name}" if event == "train" else f"{each.name}, evaluation"
            by_step.plot(steps, values, style, color=f"C{i}", label=label)
            by_time.plot(seconds, values, style, color=f"C{i}")
    if losses and min(losses) > 0:
        by_step.set_yscale("log")
    by_step.set_xlabel("step")
    by_step.set_ylabel("loss")
    by_time.set_xlabel("seconds of training")
    figure.legend(loc="outside lower center", ncols=2)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise DataError(f"--plot must be a file that can be written. Received: {str(path)!r} ({error})") from error
    return True


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        return read_lines(path)
    except OSError:
        return []


def _read_object(path: Path) -> dict[str, Any]:
    try:
        return read_object(path)
    except (OSError, ValueError):
        return {}


def _number(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number else None  # type: ignore[return-value]


def _shown(value: float | None, form: str) -> str:
    if value is None or not math.isfinite(value):
        return _NONE if value is None else str(value)
    return format(int(value) if form == "d" else value, form)
