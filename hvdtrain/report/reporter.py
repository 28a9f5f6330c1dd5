"""What can be told of a run, and to several at once."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np


@dataclasses.dataclass(frozen=True)
class RunShape:
    """How long a run is."""

    total_steps: int
    steps_per_epoch: int


class Reporter:
    """Told by the trainer what happens; this one tells nobody, as on every rank but 0.

    A part of the ranks' policy, so that the loop has none. Subclasses override what they need.
    """

    def started(self, facts: Mapping[str, Any], shape: RunShape) -> None:
        """Once, before the first step."""

    def model_built(self, model: keras.Model) -> None:
        """Once, after :meth:`started`."""

    def progressed(self, step: int, values: Mapping[str, float]) -> None:
        """At each log step: loss, metrics, speed."""

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """After each evaluation."""

    def histograms(self, step: int, weights: Mapping[str, np.ndarray], gradients: Mapping[str, np.ndarray]) -> None:
        """The values of variables and of their gradients, by the variables' paths."""

    def warned(self, step: int, text: str) -> None:
        """Something was amiss, and the run goes on."""

    def finished(self, summary: Mapping[str, Any]) -> None:
        """Once, after the last step."""

    def close(self) -> None:
        """The last call, also after an error. Calling it again changes nothing."""


class SeveralReporters(Reporter):
    """Hands each event on, in order."""

    def __init__(self, reporters: Sequence[Reporter]):
        self._reporters = reporters

    def started(self, facts: Mapping[str, Any], shape: RunShape) -> None:
        for reporter in self._reporters:
            reporter.started(facts, shape)

    def model_built(self, model: keras.Model) -> None:
        for reporter in self._reporters:
            reporter.model_built(model)

    def progressed(self, step: int, values: Mapping[str, float]) -> None:
        for reporter in self._reporters:
            reporter.progressed(step, values)

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        for reporter in self._reporters:
            reporter.evaluated(step, values)

    def histograms(self, step: int, weights: Mapping[str, np.ndarray], gradients: Mapping[str, np.ndarray]) -> None:
        for reporter in self._reporters:
            reporter.histograms(step, weights, gradients)

    def warned(self, step: int, text: str) -> None:
        for reporter in self._reporters:
            reporter.warned(step, text)

    def finished(self, summary: Mapping[str, Any]) -> None:
        for reporter in self._reporters:
            reporter.finished(summary)

    def close(self) -> None:
        for reporter in self._reporters:
            reporter.close()
