"""Logs a run as a progress bar on a terminal."""

import math
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from hvdtrain.loggers.console import ConsoleReporter, values_text
from hvdtrain.loggers.reporter import RunShape

_LINE_INTERVAL_S = 1.0
# The second line shows loss and metrics only.
_NOT_SHOWN = ("learning_rate", "gradient_norm", "examples/s", "s/batch")


class ProgressBarReporter(ConsoleReporter):
    """Draws a bar over all steps, updated at log steps; prints evaluations and warnings above it."""

    def __init__(self, console: Console | None = None):
        super().__init__()
        self._console = console or Console()
        self._progress = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(bar_width=None),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=self._console,
            expand=True,
            # The remaining time needs two log steps within this period, and they may be minutes apart.
            speed_estimate_period=3600,
        )
        # The user may have redirected stderr.
        self._live = Live(console=self._console, auto_refresh=False, redirect_stderr=False)

    def started(self, facts: Mapping[str, Any], shape: RunShape) -> None:
        super().started(facts, shape)
        self._shape = shape
        self._task = self._progress.add_task("", total=shape.total_steps, epoch=self._epoch(0), speed="")
        self._live.start()
        self._draw({})

    def reshaped(self, shape: RunShape) -> None:
        self._shape = shape
        self._progress.update(self._task, total=shape.total_steps)

    def progressed(self, step: int, values: Mapping[str, float]) -> None:
        speed = f"{values['examples/s']:.0f} examples/s" if "examples/s" in values else ""
        self._progress.update(self._task, completed=step, epoch=self._epoch(step), speed=speed)
        self._draw({name: value for name, value in values.items() if name not in _NOT_SHOWN})

    def finished(self, summary: Mapping[str, Any]) -> None:
        self._live.stop()
        super().finished(summary)

    def close(self) -> None:
        self._live.stop()

    def _epoch(self, step: int) -> str:
        current = max(1, math.ceil(self._shape.epochs(step)))
        return f"{current}/{math.ceil(self._shape.epochs(self._shape.total_steps))}"

    def _draw(self, shown: Mapping[str, float]) -> None:
        below = Text(values_text(shown), no_wrap=True, overflow="ellipsis")
        self._live.update(Group(self._progress, below), refresh=True)

    def _line(self, text: str) -> None:
        # rich prints it above the bar.
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def console_reporter(is_terminal: bool, *, prints_every_line: bool = True) -> ConsoleReporter:
    """Returns a reporter with a progress bar for terminals, or one with plain lines for files and batch systems.

    Args:
        prints_every_line: False: about a log line a second, however often the run logs.
    """
    if is_terminal:
        return ProgressBarReporter()
    return ConsoleReporter(min_interval_s=0.0 if prints_every_line else _LINE_INTERVAL_S)
