"""Times the compiled calls of a run."""

import time

import numpy as np


class Clock:
    """Durations of the calls of a run. The first call compiles; it is left out if there are others."""

    def __init__(self) -> None:
        self._start_s = time.perf_counter()
        self.calls: list[tuple[int, float]] = []
        """The steps and the duration in seconds of each call."""
        self._num_reported = 0

    @property
    def has_timed(self) -> bool:
        """False if no call was made: the run had made all its steps before."""
        return bool(self.calls)

    def wall_seconds(self) -> float:
        return time.perf_counter() - self._start_s

    def speed_since_last(self, examples_per_step: int) -> dict[str, float]:
        """The speed over the calls since this was last called."""
        seconds_per_step = _seconds_per_step(self.calls[max(self._num_reported, 1) :] or self.calls)
        self._num_reported = len(self.calls)
        return {"examples/s": examples_per_step / seconds_per_step, "s/batch": seconds_per_step}

    def seconds_per_step(self) -> float:
        """The mean over the run."""
        return _seconds_per_step(self.calls[1:] or self.calls)

    def calls_ms(self) -> list[float]:
        """The time of a step in each call, in milliseconds."""
        return [1000 * seconds / steps for steps, seconds in self.calls[1:] or self.calls]

    def step_ms(self) -> dict[str, float]:
        """Median and 95th percentile of the time of a step, in milliseconds."""
        milliseconds = self.calls_ms()
        return {"p50": float(np.percentile(milliseconds, 50)), "p95": float(np.percentile(milliseconds, 95))}


def _seconds_per_step(calls: list[tuple[int, float]]) -> float:
    return sum(seconds for _, seconds in calls) / sum(steps for steps, _ in calls)
