"""``hvdtrain compare``: a table of runs, and a figure of their losses; reads whatever files each run has."""

import math
from collections.abc import Sequence
from pathlib import Path

from hvdtrain.commands.figures import NO_FIGURE, make_figure
from hvdtrain.commands.tables import aligned
from hvdtrain.errors import DataError, UsageError
from hvdtrain.runs.run_record import NOT_METRICS, RunRecord, number, read_run
from hvdtrain.stores.urls import is_url, require_usable

_FIGURES = (".png", ".svg", ".pdf")
_NONE = "-"


def row(run: RunRecord) -> dict[str, str]:
    """The cells of a run's row of the table by column; columns without a value are left out."""
    train, evaluation = run.last("train"), run.last("eval")
    evaluated = run.summary.get("eval") or {
        name: value for name, value in evaluation.items() if name not in NOT_METRICS
    }
    steps = number(run.summary.get("steps", train.get("step")))
    seconds = [number(event.get("elapsed_seconds")) for event in run.events]
    wall_s = max((each for each in seconds if each is not None), default=number(run.summary.get("wall_seconds")))
    speed = number(run.summary.get("examples_per_second", train.get("examples/s")))
    share = number(run.summary.get("communication_fraction"))
    cells = {
        "run": run.name,
        "task": _fact(run, "task"),
        "mode": _fact(run, "mode"),
        "ranks": _shown(number(run.summary.get("ranks")), "d"),
        "steps": _shown(steps, "d") + ("" if run.summary else " (unfinished)"),
        "loss": _shown(number(run.summary.get("loss", train.get("loss"))), ".4g"),
        **{f"eval {name}": _shown(number(value), ".4g") for name, value in dict(evaluated).items()},
        "examples/s": _shown(speed, ".0f"),
        "time": _NONE if wall_s is None else f"{wall_s:.1f} s",
        "communication": _NONE if share is None else f"{100 * share:.0f} %",
    }
    return {name: cell for name, cell in cells.items() if cell != _NONE}


def _fact(run: RunRecord, name: str) -> str:
    value = run.summary.get(name, run.config.get(name))
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
    print(table(list(map(row, found))), flush=True)
    if plot is not None:
        print(f"written: {plot}" if draw(found, plot) else NO_FIGURE.format(plot), flush=True)
    return 0


def table(rows: Sequence[dict[str, str]]) -> str:
    """Formats rows; a column that no row has is left out."""
    last = ("examples/s", "time", "communication")
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in last]
    names += [name for name in last if any(name in row for row in rows)]
    return "\n".join(aligned([names, *([row.get(name, _NONE) for name in names] for row in rows)]))


def draw(runs: Sequence[RunRecord], path: Path) -> bool:
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
            steps, values = each.points(event, "step", "loss")
            seconds, timed = each.points(event, "elapsed_seconds", "loss")
            losses += values
            label = f"{each.name}" if event == "train" else f"{each.name}, evaluation"
            by_step.plot(steps, values, style, color=f"C{i}", label=label)
            by_time.plot(seconds, timed, style, color=f"C{i}")
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


def _shown(value: float | None, form: str) -> str:
    if value is None or not math.isfinite(value):
        return _NONE if value is None else str(value)
    return format(int(value) if form == "d" else value, form)
