"""Interleaved measurements of cases, and their statistics."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hvdtrain.commands.bench.cases import Block, Case
from hvdtrain.commands.session import Session
from hvdtrain.errors import StoppedEarly

Measured = dict[str, list[list[Block]]]
"""By case name: for each measurement, the blocks of the participating ranks."""


def interleaved(cases: Sequence[Case], steps: int, times: int, session: Session) -> Measured:
    """Measures all cases ``times`` times, rotating their order. Collective: all ranks must call it."""
    measured: Measured = {case.name: [] for case in cases}
    for i in range(times):
        for j in range(len(cases)):
            case = cases[(i + j) % len(cases)]
            if session.job_watch.check():
                raise StoppedEarly(f"stopped on {session.job_watch.stop_reason}. Nothing is reported.")
            session.collectives.barrier()
            own = case.measure(steps) if case.takes_part else None
            measured[case.name].append([block for block in session.collectives.allgather(own) if block is not None])
    return measured


def seconds_per_step(measured: Measured, name: str) -> list[float]:
    """Seconds per step on the slowest rank, for each measurement."""
    return [max(block.seconds / block.steps for block in blocks) for blocks in measured[name]]


def spread(values: Sequence[float]) -> float:
    """Relative difference between the medians of even- and odd-numbered values."""
    one, other = statistics.median(values[::2]), statistics.median(values[1::2])
    return abs(one - other) / min(one, other)


def unsteadiness(measured: Measured, name: str, max_spread: float) -> str | None:
    """Why a case counts as unsteady: repeated measurements of it differ by more than ``max_spread``; None if not."""
    values = seconds_per_step(measured, name)
    if (found := spread(values)) <= max_spread:
        return None
    one, other = (1000 * statistics.median(half) for half in (values[::2], values[1::2]))
    return (
        f"two measurements of {name!r} must differ by at most {max_spread:.0%}. Received: {one:.3f} and {other:.3f} ms "
        f"per step, {found:.0%} apart. Its values and ratios are unreliable: stop other programs here, or increase "
        "--block-seconds or --max-spread."
    )


def describe(measured: Measured, name: str, calls_ms: Sequence[float]) -> dict[str, Any]:
    """The reported statistics of a case.

    Args:
        calls_ms: step times of all calls of all ranks, in milliseconds.
    """
    values = seconds_per_step(measured, name)
    per_second = [sum(block.samples / block.seconds for block in blocks) for blocks in measured[name]]
    cpu = [sum(block.cpu_seconds for block in blocks) / blocks[0].steps for blocks in measured[name]]
    return {
        "ranks": len(measured[name][0]),
        "step_ms": 1000 * statistics.median(values),
        "step_ms_range": [1000 * min(values), 1000 * max(values)],
        "step_ms_p50": float(np.percentile(calls_ms, 50)),
        "step_ms_p95": float(np.percentile(calls_ms, 95)),
        "spread": spread(values),
        "examples_per_second": statistics.median(per_second),
        "cpu_seconds_per_step": statistics.median(cpu),
    }


def ratio(measured: Measured, name: str, to: str) -> dict[str, float]:
    """Ratio of the step times of two cases, paired by measurement."""
    pairs = zip(seconds_per_step(measured, name), seconds_per_step(measured, to), strict=True)
    ratios = [one / other for one, other in pairs]
    return {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}


def recommended(times: Mapping[str, float]) -> str:
    """The compression to recommend; a less accurate one must be more than a tenth faster.

    Args:
        times: step times relative to one without compression, in order of decreasing accuracy.
    """
    best = "none"
    for name, time in times.items():
        if time < 0.9 * times.get(best, 1.0):
            best = name
    return best
