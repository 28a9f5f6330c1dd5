"""The command: task, cases, measurements, report, in this order."""

import json
from pathlib import Path
from typing import Any

from hvdtrain import process, runtime
from hvdtrain.bench import gradient_times, measurements, predicted, reductions, report
from hvdtrain.bench.cases import ALONE, APART, LOCAL, SYNC, Case, make_cases, steps_of_a_block
from hvdtrain.building import read_task, with_task_defaults
from hvdtrain.config import BenchConfig
from hvdtrain.errors import DataError, HvdtrainError
from hvdtrain.failure import JobWatch, on_every_rank, on_first_rank
from hvdtrain.files import write_text
from hvdtrain.session import run_on_ranks
from hvdtrain.tasks import Data, Task


def run(config: BenchConfig | None, refused: HvdtrainError | None) -> int:
    """Measures on all ranks, or tells every rank why this one cannot.

    Returns:
        The exit code.
    """
    return run_on_ranks(
        config, refused, start=lambda: runtime.init(threads=config.threads if config else None), work=_measure
    )


def _measure(asked: BenchConfig, watch: JobWatch) -> None:
    collectives = runtime.current().collectives
    runtime.init(seed=asked.seed)
    on_every_rank(lambda: predicted.require_links(asked, collectives.size, collectives.cross_size), collectives)
    on_first_rank(lambda: _make_folder(Path(asked.output)), collectives)
    task, data = on_every_rank(lambda: read_task(asked), collectives)
    config = on_every_rank(lambda: with_task_defaults(asked, task), collectives)
    assert isinstance(config, BenchConfig)
    cases = make_cases(config, task, data, watch)
    steps = steps_of_a_block(config, cases)
    measured = measurements.in_turn(cases, steps, config.blocks, collectives, watch)
    on_every_rank(lambda: measurements.require_steady(measured, config.max_spread), collectives)
    found = _facts(config, cases, measured, steps)
    if collectives.size > 1:
        found["network"] = reductions.measure(collectives)
    if config.predict is not None:
        found["prediction"] = on_every_rank(lambda: _predict(config, task, data, found, cases, watch), collectives)
    on_first_rank(lambda: _write(found, Path(config.output)), collectives)


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"--output must be a folder that can be written. Received: {path} ({error})") from None


def _facts(config: BenchConfig, cases: list[Case], measured: measurements.Measured, steps: int) -> dict[str, Any]:
    topology, collectives = runtime.current().topology, runtime.current().collectives
    found: dict[str, Any] = {
        "task": config.task,
        "parameters": cases[0].trainer.model.count_params(),
        "ranks": topology.size,
        "hosts": topology.cross_size,
        "threads": topology.threads,
        "device": topology.device,
        "launcher": topology.launcher,
        "versions": process.versions(),
        "options": config.as_dict(),
        "steps_of_a_measurement": steps,
        "cases": {},
        "ratios": {},
    }
    for case in cases:
        calls_ms = [each for calls in collectives.allgather(case.clock.calls_ms()) for each in calls]
        found["cases"][case.name] = measurements.describe(measured, case.name, calls_ms)
    for name, to in ((APART, ALONE), (SYNC, APART), (LOCAL, APART)):
        if name in measured:
            found["ratios"][f"{name} over {to}"] = measurements.ratio(measured, name, to)
    shown = next((case for case in cases if case.name == SYNC), cases[0])
    found["shares"] = shown.trainer.shares.summary(found["cases"][shown.name]["step_ms"])
    speed = found["cases"][shown.name]["examples_per_second"]
    found["scaling_efficiency"] = speed / (topology.size * found["cases"][ALONE]["examples_per_second"])
    return found


def _predict(
    config: BenchConfig, task: Task, data: Data, found: dict[str, Any], cases: list[Case], watch: JobWatch
) -> dict[str, Any]:
    apart = next((case for case in cases if case.name == APART), cases[0])
    seconds = [each / 1000 for each in apart.clock.calls_ms()]
    return predicted.predict(config, found, seconds, gradient_times.measure(config, task, data, watch))


def _write(found: dict[str, Any], folder: Path) -> None:
    write_text(folder / "bench.json", json.dumps(found, indent=2) + "\n")
    is_drawn = report.draw(found, folder / "bench.png")
    print(report.table(found), flush=True)
    if "prediction" in found:
        print(predicted.table(found["prediction"]), flush=True)
    print(f"written: {folder / 'bench.json'}" + (f", {folder / 'bench.png'}" if is_drawn else ""), flush=True)
    if not is_drawn:
        print("no figure was drawn: matplotlib is not installed", flush=True)
