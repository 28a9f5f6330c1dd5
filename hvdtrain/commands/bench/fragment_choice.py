"""Chooses the interval and the fragments of local SGD with which averages are hidden behind the steps."""

import dataclasses
import math

import numpy as np

from hvdtrain.commands.bench.scaling_model import Averaging, Cluster, MeasuredStep, Predicted, Reduction, local_step

_INTERVALS = (4, 8, 16, 32, 64, 128, 256)
_FRAGMENTS = (8, 4, 2, 1)
# The longest that averaging may take, of the time in which it is hidden: networks and steps vary.
_MAX_BUSY = 0.5


@dataclasses.dataclass(frozen=True)
class Choice:
    """Options of local SGD, and what they are predicted to do."""

    every: int
    fragments: int
    delay: int
    average_steps: float
    """The time of one average, in steps."""
    predicted: Predicted


def choose(step: MeasuredStep, cluster: Cluster, max_fragments: int) -> Choice | None:
    """The shortest interval in which averages take at most half of the time, with as many fragments as that allows.

    A short interval keeps replicas close, and fragments divide the bytes that are sent at once. Each fragment costs the
    latency of an average, which limits their number. None: even the longest interval is too short.
    """
    step_s = float(np.mean(step.seconds))
    for every in _INTERVALS:
        for fragments in (each for each in _FRAGMENTS if each <= min(every, max_fragments)):
            average_steps = Reduction(cluster)(math.ceil(step.bytes / fragments)) / step_s
            round_steps = every // fragments
            if average_steps <= _MAX_BUSY * round_steps:
                delay = min(round_steps, max(1, math.ceil(average_steps / _MAX_BUSY)))
                averaging = Averaging(every, overlap=True, fragments=fragments, delay=delay)
                return Choice(every, fragments, delay, average_steps, local_step(step, cluster, averaging))
    return None
