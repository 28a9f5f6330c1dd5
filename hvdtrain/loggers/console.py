"""Logs a run as lines on the console."""

import math
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from hvdtrain.config.wording import option
from hvdtrain.loggers.reporter import Reporter, RunShape


class ConsoleReporter(Reporter):
    """Prints one line per event and a table of results at the end.

    Args:
        stream: where to print (default: standard output).
        min_interval_s: seconds between two log lines. Those in between are not printed, except for the last one and
            one that belongs to an evaluation; other events always are.
    """

    def __init__(self, stream: TextIO | None = None, *, min_interval_s: float = 0.0):
        self._stream = stream or sys.stdout
        self._min_interval_s = min_interval_s
        self._next_line_s = -math.inf
        self._held: tuple[int, str] | None = None

    def started(self, facts: Mapping[str, Any], shape: RunShape) -> None:
        for name, value in facts.items():
            self._line(f"{name}: {value}")

    def resumed(self, step: int, path: Path) -> None:
        self._event(step, f"resumed from {path}")

    def progressed(self, step: int, values: Mapping[str, float]) -> None:
        self._held = (step, _event_line(step, values_text(values)))
        now_s = time.monotonic()
        if now_s >= self._next_line_s:
            self._next_line_s = now_s + self._min_interval_s
            self._print_held()

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        if self._held is not None and self._held[0] == step:
            self._print_held()
        self._event(step, f"evaluation: {values_text(values)}")

    def members_changed(self, step: int, values: Mapping[str, float]) -> None:
        self._event(
            step, f"{int(values['ranks'])} rank(s) from now on, after a pause of {values['pause_seconds']:.2g} s"
        )

    def warned(self, step: int, text: str) -> None:
        self._event(step, f"warning: {text}")

    def finished(self, summary: Mapping[str, Any]) -> None:
        self._print_held()
        self._line(f"done: {summary['steps']} steps on {summary['ranks']} rank(s) in {summary['wall_seconds']:.1f} s")
        for name, value in _rows(summary):
            self._line(f"  {name:<15}  {value}")
        if summary["eval"]:
            self._line(f"evaluation: {values_text(summary['eval'])}")
        if summary["ranks"] > 1:
            self._line("weights: equal on all ranks")

    def already_complete(self, steps: int, path: Path | str) -> None:
        self._line(
            f"run already complete: {path}, {steps} steps. Nothing was trained. To continue, increase "
            f"{option('steps')} or {option('epochs')}; to train from scratch, use another "
            f"{option('run_dir', argument='folder')}."
        )

    def close(self) -> None:
        self._print_held()

    def _print_held(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            self._line(held[1])

    def _event(self, step: int, text: str) -> None:
        self._line(_event_line(step, text))

    def _line(self, text: str) -> None:
        # One write: launchers tag and interleave the output of ranks line by line.
        self._stream.write(text + "\n")
        self._stream.flush()


def _event_line(step: int, text: str) -> str:
    return f"{time.strftime('%H:%M:%S')}  step {step}  {text}"


def values_text(values: Mapping[str, float]) -> str:
    """Formats names and values for one line."""
    return "  ".join(f"{name} {value:.4g}" for name, value in values.items())


def _rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the rows of the table, except those without a value in the summary."""
    epochs = summary.get("epochs")
    yield "steps", f"{summary['steps']}" + ("" if epochs is None else f" ({epochs:.4g} epochs)")
    if (speed := summary.get("examples_per_second")) is not None:
        yield "examples/s", f"{speed:.0f}"
    if step_ms := summary.get("step_ms"):
        yield "step time", f"{step_ms['p50']:.2f} ms (p50)  {step_ms['p95']:.2f} ms (p95)"
    shares = {name: summary.get(f"{name}_fraction") for name in ("input", "compute", "communication")}
    known = [f"{name} {_percent(share)}" for name, share in shares.items() if share is not None]
    if known:
        yield "share of step", "  ".join(known)
    if skew := summary.get("skew"):
        yield (
            "slowest rank",
            f"{skew['slowest_rank']} (host {skew['slowest_host']}): last in {_percent(skew['slowest_share'])} "
            f"of steps, {skew['ratio']:.2f} times the median",
        )
        if remedy := skew.get("remedy"):
            yield "remedy", f"{remedy['option']}: about {remedy['speedup']:.2f} times as many samples/s"
    if sizes := summary.get("rank_batch_sizes"):
        yield "batch sizes", f"{', '.join(map(str, sizes))} (by rank)"
    if batch := summary.get("effective_batch"):
        smallest, largest = batch["min"], batch["max"]
        yield "effective batch", f"{batch['mean']:.1f} samples (mean)  {smallest} (min)  {largest} (max)"
        late, saved_s = ", ".join(map(str, summary["dropped_micro_batches"])), summary["time_saved_seconds"]
        yield "late", f"{late} micro-batches (by rank), trained on later; {saved_s:.1f} s not waited for them"
    skipped = [
        *_counted(summary.get("skipped_steps"), "step", "not finite"),
        *_counted(summary.get("bad_samples"), "sample", "unreadable"),
    ]
    if skipped:
        yield "skipped", ", ".join(skipped)
    if (error := summary.get("compression_error")) is not None:
        yield "compression", f"left out {error:.1e} of the last gradient's norm, for the next step"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _counted(number: int | None, noun: str, why: str) -> list[str]:
    return [f"{number} {noun}{'' if number == 1 else 's'} ({why})"] if number else []
