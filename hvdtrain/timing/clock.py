"""How long the calls of a run take."""

import time

import numpy as np


class Clock:
    """Times the calls of a run. The first call compiles; it is left out where there are others."""

    def __init__(self) -> None:
        self._began_s = time.perf_counter()
        self._call_began_s = 0.0
        self._calls: list[tuple[int, float]] = []
        self._told = 0

    @property
    def has_timed(self) -> bool:
        """False where no call was made: a run that had made all its steps before."""
        return bool(self._calls)

    def start_call(self) -> None:
        self._call_began_s = time.perf_counter()

    def end_call(self, steps: int) -> None:
        self._calls.append((steps, time.perf_counter() - self._call_began_s))

    def wall_seconds(self) -> float:
        return time.perf_counter() - self._began_s

    def speed_since_last(self, examples_per_step: int) -> dict[str, float]:
        """Over the calls since this was last asked."""
        seconds_per_step = _seconds_per_step(self._calls[max(self._told, 1) :] or self._calls)
        self._told = len(self._calls)
        return {"examples/s": examples_per_step / seconds_per_step, "s/batch": seconds_per_step}

    def seconds_per_step(self) -> float:
        """The mean over the run."""
        return _seconds_per_step(self._calls[1:] or self._calls)

    def calls_ms(self) -> list[float]:
        """The time of a step in each call, in milliseconds."""
        return [1000 * seconds / steps for steps, seconds in self._calls[1:] or self._calls]

    def step_ms(self) -> dict[str, float]:
        """Median and 95th percentile of the time of a step, in milliseconds."""
        milliseconds = self.calls_ms()
        return {"p50": float(np.percentile(milliseconds, 50)), "p95": float(np.percentile(milliseconds, 95))}


def _seconds_per_step(calls: list[tuple[int, float]]) -> float:
    return sum(seconds for _, seconds in calls) / sum(steps for steps, _ in calls)
