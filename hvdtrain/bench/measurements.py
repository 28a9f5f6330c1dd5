"""Measurements in turn, and what can be told of them."""

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdtrain.bench.cases import Block, Case
from hvdtrain.collectives import Collectives
from hvdtrain.errors import HvdtrainError, StoppedEarly
from hvdtrain.failure import JobWatch

Measured = dict[str, list[list[Block]]]
"""Of each case by its name, of each measurement, what the ranks did that took part."""


class UnsteadyError(HvdtrainError):
    """The machine gave different answers to the same question."""


def in_turn(cases: Sequence[Case], steps: int, times: int, collectives: Collectives, watch: JobWatch) -> Measured:
    """Measures each case as often; every rank has to call it. Which one comes first changes each time."""
    measured: Measured = {case.name: [] for case in cases}
    for i in range(times):
        for j in range(len(cases)):
            case = cases[(i + j) % len(cases)]
            if watch.check():
                raise StoppedEarly(f"stopped on {watch.stop_reason}, as asked. Nothing is reported.")
            collectives.barrier()
            own = case.measure(steps) if case.is_mine else None
            measured[case.name].append([block for block in collectives.allgather(own) if block is not None])
    return measured


def seconds_per_step(measured: Measured, name: str) -> list[float]:
    """Of each measurement, for the slowest rank."""
    return [max(block.seconds / block.steps for block in blocks) for blocks in measured[name]]


def spread(values: Sequence[float]) -> float:
    """By what share the median of every other value differs from that of those between."""
    one, other = statistics.median(values[::2]), statistics.median(values[1::2])
    return abs(one - other) / min(one, other)


def require_steady(measured: Measured, max_spread: float) -> None:
    """Raises UnsteadyError where a case was not measured twice alike."""
    for name in measured:
        values = seconds_per_step(measured, name)
        if (found := spread(values)) > max_spread:
            one, other = (1000 * statistics.median(half) for half in (values[::2], values[1::2]))
            raise UnsteadyError(
                f"two measurements of {name!r} must differ by at most {max_spread:.0%}. Received: {one:.3f} and "
                f"{other:.3f} ms a step, {found:.0%} apart. Nothing is reported. Something else uses this machine, or "
                "--block-seconds is too short; --max-spread says what is allowed."
            )


def describe(measured: Measured, name: str, calls_ms: Sequence[float]) -> dict[str, Any]:
    """What is told of a case.

    Args:
        calls_ms: the times of a step in all calls of all ranks, in milliseconds.
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
    """The time of a step in one case over that in another, measured one after the other each time."""
    pairs = zip(seconds_per_step(measured, name), seconds_per_step(measured, to), strict=True)
    ratios = [one / other for one, other in pairs]
    return {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
