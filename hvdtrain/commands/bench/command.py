"""The command: task, cases, measurements and report, in this order."""

import json
from pathlib import Path
from typing import Any

from hvdtrain.commands.bench import gpu_copies, gradient_times, measurements, prediction, reductions, report
from hvdtrain.commands.bench.cases import (
    ALONE,
    INDEPENDENT,
    LOCAL,
    SYNC,
    Case,
    compressed,
    make_cases,
    steps_per_block,
)
from hvdtrain.commands.bench.config import BenchConfig
from hvdtrain.commands.building import local_data_dir, read_task, with_task_defaults
from hvdtrain.commands.figures import NO_FIGURE
from hvdtrain.commands.session import Session, run_on_ranks
from hvdtrain.config.fields import as_dict
from hvdtrain.data import Data
from hvdtrain.distributed import runtime
from hvdtrain.errors import DataError, HvdtrainError
from hvdtrain.fault_tolerance.collective_errors import on_every_rank, on_first_rank
from hvdtrain.local_sgd.fragment_division import max_fragments
from hvdtrain.runs.run_files import BENCH
from hvdtrain.system import versions
from hvdtrain.system.atomic_files import write_text
from hvdtrain.tasks.task import Task


def run(config: BenchConfig | None, refused: HvdtrainError | None) -> int:
    """Measures on all ranks, or reports on every rank why this one cannot.

    Returns:
        The exit code.
    """
    return run_on_ranks(config, refused, _measure)


def _measure(config: BenchConfig, session: Session) -> None:
    collectives = session.collectives
    runtime.init(seed=config.training.seed)
    on_every_rank(
        lambda: prediction.require_links(config.prediction, collectives.size, collectives.cross_size), collectives
    )
    output = Path(config.measurement.output)
    on_first_rank(lambda: _make_folder(output), collectives)
    data_dir = local_data_dir(config, collectives)
    task, data = on_every_rank(lambda: read_task(config, data_dir), collectives)
    config = on_every_rank(lambda: with_task_defaults(config, task), collectives)
    cases = make_cases(config, task, data, session)
    steps = steps_per_block(config, cases, collectives)
    measured = measurements.interleaved(cases, steps, config.measurement.blocks, session)
    found = _facts(config, cases, measured, steps, session)
    copies = on_every_rank(lambda: gpu_copies.measure(cases[0].runner), collectives)
    if copies is not None:
        found["copies"] = copies
    if collectives.size > 1:
        found["network"] = reductions.measure(collectives)
    if config.prediction.predict is not None:
        found["prediction"] = on_every_rank(lambda: _predict(config, task, data, found, cases, session), collectives)
    on_first_rank(lambda: _write(found, output), collectives)


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"--output must be a folder that can be written. Received: {path} ({error})") from None


def _facts(
    config: BenchConfig, cases: list[Case], measured: measurements.Measured, steps: int, session: Session
) -> dict[str, Any]:
    topology = runtime.current().topology
    found: dict[str, Any] = {
        "task": config.task,
        "parameters": cases[0].runner.model.count_params(),
        "ranks": topology.size,
        "hosts": topology.cross_size,
        "threads": topology.threads,
        "device": topology.device,
        "launcher": topology.launcher,
        "versions": versions.versions(),
        "options": as_dict(config),
        "steps_of_a_measurement": steps,
        "cases": {},
        "ratios": {},
    }
    for case in cases:
        calls_ms = [each for calls in session.collectives.allgather(case.clock.calls_ms()) for each in calls]
        unsteady = measurements.unsteadiness(measured, case.name, config.measurement.max_spread)
        found["cases"][case.name] = {**measurements.describe(measured, case.name, calls_ms), "unsteady": unsteady}
    compressions = {name: compressed(name) for name in config.measurement.measured_compressions}
    pairs = [(INDEPENDENT, ALONE), (SYNC, INDEPENDENT), (LOCAL, INDEPENDENT)]
    for name, to in (*pairs, *((case, SYNC) for case in compressions.values())):
        if name in measured:
            found["ratios"][f"{name} over {to}"] = measurements.ratio(measured, name, to)
    found["bytes_per_step"] = {case.name: case.runner.bytes_per_step for case in cases if case.name.startswith(SYNC)}
    if compressions and SYNC in measured:
        slowdowns = {name: found["ratios"][f"{case} over {SYNC}"]["median"] for name, case in compressions.items()}
        found["recommended_compression"] = measurements.recommended(slowdowns)
    shown = next((case for case in cases if case.name == SYNC), cases[0])
    found["shares"] = shown.runner.parts.time_shares.summary(found["cases"][shown.name]["step_ms"])
    speed = found["cases"][shown.name]["examples_per_second"]
    found["scaling_efficiency"] = speed / (topology.size * found["cases"][ALONE]["examples_per_second"])
    return found


def _predict(
    config: BenchConfig, task: Task, data: Data, found: dict[str, Any], cases: list[Case], session: Session
) -> dict[str, Any]:
    independent = next((case for case in cases if case.name == INDEPENDENT), cases[0])
    seconds = [each / 1000 for each in independent.clock.calls_ms()]
    messages = gradient_times.measure(config, task, data, session)
    fragments = max_fragments(independent.runner.model)
    return prediction.predict(config, found, seconds, messages, max_fragments=fragments)


def _write(found: dict[str, Any], folder: Path) -> None:
    write_text(folder / BENCH, json.dumps(found, indent=2) + "\n")
    is_drawn = report.draw(found, folder / "bench.png")
    print(report.table(found), flush=True)
    if "prediction" in found:
        print(prediction.table(found["prediction"]), flush=True)
    print(f"written: {folder / BENCH}" + (f", {folder / 'bench.png'}" if is_drawn else ""), flush=True)
    if not is_drawn:
        print(NO_FIGURE.format(folder / "bench.png"), flush=True)
