"""What can be told of a run, and to several at once."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.failure import tell


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

    def resumed(self, step: int, path: Path) -> None:
        """Once, after :meth:`model_built`, where a run goes on from a checkpoint."""

    def progressed(self, step: int, values: Mapping[str, float]) -> None:
        """At each log step: loss, metrics, speed."""

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """After each evaluation."""

    def histograms(self, step: int, groups: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        """The values of ``weights``, ``gradients`` (by the variables' paths) and ``activations`` (by layers)."""

    def warned(self, step: int, text: str) -> None:
        """Something was amiss, and the run goes on."""

    def finished(self, summary: Mapping[str, Any]) -> None:
        """Once, after the last step."""

    def complete(self, steps: int, path: Path) -> None:
        """Instead of all others: the run in this folder has made all its steps already."""

    def close(self) -> None:
        """The last call, also after an error. Calling it again changes nothing."""


class SeveralReporters(Reporter):
    """Hands each event on, in order.

    A full disk costs log lines, not the run: where a reporter other than the first cannot write, that is
    told once, and training goes on.
    """

    def __init__(self, reporters: Sequence[Reporter]):
        self._reporters = reporters
        self._failed: set[Reporter] = set()

    def started(self, facts: Mapping[str, Any], shape: RunShape) -> None:
        self._hand_on("started", facts, shape)

    def model_built(self, model: keras.Model) -> None:
        self._hand_on("model_built", model)

    def resumed(self, step: int, path: Path) -> None:
        self._hand_on("resumed", step, path)

    def progressed(self, step: int, values: Mapping[str, float]) -> None:
        self._hand_on("progressed", step, values)

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        self._hand_on("evaluated", step, values)

    def histograms(self, step: int, groups: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        self._hand_on("histograms", step, groups)

    def warned(self, step: int, text: str) -> None:
        self._hand_on("warned", step, text)

    def finished(self, summary: Mapping[str, Any]) -> None:
        self._hand_on("finished", summary)

    def complete(self, steps: int, path: Path) -> None:
        self._hand_on("complete", steps, path)

    def close(self) -> None:
        self._hand_on("close")

    def _hand_on(self, event: str, *arguments: Any) -> None:
        for reporter in self._reporters:
            try:
                getattr(reporter, event)(*arguments)
            except (OSError, tf.errors.OpError) as error:
                if reporter is self._reporters[0]:
                    raise
                if reporter not in self._failed:
                    self._failed.add(reporter)
                    tell(0, f"{type(reporter).__name__} cannot write: {error}. Training goes on.")
