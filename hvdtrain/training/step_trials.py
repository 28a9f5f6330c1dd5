"""Trials: the time of a step of several alternatives, measured in turn, on the slowest rank."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from hvdtrain.distributed.collectives import Collectives

BLOCKS, BLOCK_S = 5, 0.3
"""How often each alternative is measured, and for how many seconds."""
STEPS_PER_EXECUTION = (1, 4, 16)
"""How many steps a call may make; more gain nothing, and signals and callbacks wait longer."""
_MIN_GAIN = 0.02
"""A smaller difference is noise: then the first alternative, which is the default, is kept."""


class TimedSteps:
    """Compiled steps, timed on all ranks at the same time. Collective: all ranks must make it, and measure it.

    Args:
        run: makes a number of steps, a multiple of ``call``, and returns when they have been made.
        call: the steps of a call.
        start_s: when their compilation began, by ``time.perf_counter()``.
    """

    def __init__(self, run: Callable[[int], None], call: int, collectives: Collectives, *, start_s: float):
        self._run, self._collectives = run, collectives
        self._time(call)
        self.start_s = max(collectives.allgather(time.perf_counter() - start_s))
        """Seconds to build and compile them, on the slowest rank."""
        self._block = call * max(1, round(BLOCK_S / (call * self._time(call))))
        self.step_s = self.measure()
        """Seconds per step, of one block."""

    def measure(self) -> float:
        """Seconds per step of the slowest rank, over a block of steps; the same on every rank."""
        return self._time(self._block)

    def _time(self, steps: int) -> float:
        self._collectives.barrier()
        start_s = time.perf_counter()
        self._run(steps)
        return max(self._collectives.allgather(time.perf_counter() - start_s)) / steps


class Measured(Protocol):
    """An alternative."""

    def measure(self) -> float:
        """Seconds per step, over a block of steps; the same on every rank."""


def interleaved(alternatives: Sequence[Measured]) -> list[float]:
    """The seconds of a step of each: the median of blocks that are measured in turn; the same on every rank."""
    blocks = [[each.measure() for each in alternatives] for _ in range(BLOCKS)]
    return [statistics.median(each) for each in zip(*blocks, strict=True)]


def fastest(seconds: Sequence[float]) -> int:
    """The number of the fastest alternative; 0 unless it is faster than the first by more than noise.

    Args:
        seconds: of a step of each.
    """
    best = min(range(len(seconds)), key=seconds.__getitem__)
    return best if seconds[best] <= (1 - _MIN_GAIN) * seconds[0] else 0
