"""The interface of reporters, and a reporter that forwards to several others."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.system.terminal import report


@dataclasses.dataclass(frozen=True)
class RunShape:
    """The length of a run, and where this process begins."""

    total_steps: int
    steps_per_epoch: int
    resumed_step: int = 0
    global_batch_size: int = 0
    """Samples in a step, over all ranks."""
    samples_per_epoch: int = 0
    """Samples that an epoch trains on; the last step of an epoch may have fewer than the others."""
    first_step: int = 0
    """The first step with this number of samples."""
    first_sample: int = 0
    """The first sample of that step, counted across epochs."""

    def epochs(self, step: int) -> float:
        """Epochs completed after a step, including the fraction of the current one."""
        first_step, epoch = self._first_whole_epoch
        return epoch + (step - first_step) / self.steps_per_epoch

    def samples(self, step: int) -> int:
        """Samples trained on up to a step, over all ranks and epochs."""
        first_step, epoch = self._first_whole_epoch
        if step < first_step:
            return self.first_sample + (step - self.first_step) * self.global_batch_size
        epochs, rest = divmod(step - first_step, self.steps_per_epoch)
        return (epoch + epochs) * self.samples_per_epoch + rest * self.global_batch_size

    @property
    def _first_whole_epoch(self) -> tuple[int, int]:
        """The first epoch with a constant batch size: its first step, and its number."""
        if not self.first_sample:
            return self.first_step, 0
        rest = -self.first_sample % self.samples_per_epoch
        return self.first_step - (-rest // self.global_batch_size), -(-self.first_sample // self.samples_per_epoch)


class Reporter:
    """Receives events of a run from the trainer; this base class ignores them, as ranks other than 0 do.

    Which ranks log is decided by the choice of reporter, not by the training loop. Subclasses override the events
    that they log.
    """

    def started(self, facts: Mapping[str, Any], shape: RunShape) -> None:
        """Called once, before the first step."""

    def reshaped(self, shape: RunShape) -> None:
        """Called when the number of samples in a step has changed, and so perhaps the length of the run."""

    def model_built(self, model: keras.Model) -> None:
        """Called once, after :meth:`started`."""

    def resumed(self, step: int, path: Path) -> None:
        """Called once, after :meth:`model_built`, if the run resumes from a checkpoint."""

    def progressed(self, step: int, values: Mapping[str, float]) -> None:
        """Called at each log step, with loss, metrics and speed."""

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """Called after each evaluation."""

    def members_changed(self, step: int, values: Mapping[str, float]) -> None:
        """Called when the ranks have changed, with ``ranks``, ``ranks_before`` and ``pause_seconds``."""

    def saved(self, step: int, values: Mapping[str, float]) -> None:
        """Called after a checkpoint was taken, with ``blocked_seconds``: how long training stood still for it."""

    def rank_times(self, last_step: int, seconds: np.ndarray, batch_sizes: Sequence[int]) -> None:
        """Called with the times of the last steps on all ranks, every 512 steps and at the end.

        Args:
            seconds: waiting for input, from the start of a step until the rank's gradients are computed, and
                reducing them; shape ``[ranks, steps, 3]``. NaN for steps without a reduction.
            batch_sizes: the samples of each rank in a micro-batch.
        """

    def histograms(self, step: int, groups: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        """Called with the values of ``weights`` and ``gradients`` by variable path, and of ``activations`` by layer."""

    def warned(self, step: int, text: str) -> None:
        """Called when something is wrong but the run continues."""

    def profile_begins(self) -> None:
        """Called before each call of steps to profile."""

    def profile_ends(self) -> None:
        """Called after the last step to profile, and at the end of the run."""

    def finished(self, summary: Mapping[str, Any]) -> None:
        """Called once, after the last step."""

    def already_complete(self, steps: int, path: Path | str) -> None:
        """Called instead of all other events if the run with this path or URL has already completed all steps."""

    def close(self) -> None:
        """Called last, also after an error. Further calls have no effect."""


class CompositeReporter(Reporter):
    """Forwards each event to several reporters, in order.

    If a reporter cannot write (the disk is full, or the console is closed), a message is printed once and training
    continues.
    """

    def __init__(self, reporters: Sequence[Reporter]):
        self._reporters = reporters
        self._failed: set[Reporter] = set()

    def started(self, facts: Mapping[str, Any], shape: RunShape) -> None:
        self._forward("started", facts, shape)

    def reshaped(self, shape: RunShape) -> None:
        self._forward("reshaped", shape)

    def model_built(self, model: keras.Model) -> None:
        self._forward("model_built", model)

    def resumed(self, step: int, path: Path) -> None:
        self._forward("resumed", step, path)

    def progressed(self, step: int, values: Mapping[str, float]) -> None:
        self._forward("progressed", step, values)

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        self._forward("evaluated", step, values)

    def members_changed(self, step: int, values: Mapping[str, float]) -> None:
        self._forward("members_changed", step, values)

    def saved(self, step: int, values: Mapping[str, float]) -> None:
        self._forward("saved", step, values)

    def rank_times(self, last_step: int, seconds: np.ndarray, batch_sizes: Sequence[int]) -> None:
        self._forward("rank_times", last_step, seconds, batch_sizes)

    def histograms(self, step: int, groups: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        self._forward("histograms", step, groups)

    def warned(self, step: int, text: str) -> None:
        self._forward("warned", step, text)

    def profile_begins(self) -> None:
        self._forward("profile_begins")

    def profile_ends(self) -> None:
        self._forward("profile_ends")

    def finished(self, summary: Mapping[str, Any]) -> None:
        self._forward("finished", summary)

    def already_complete(self, steps: int, path: Path | str) -> None:
        self._forward("already_complete", steps, path)

    def close(self) -> None:
        self._forward("close")

    def _forward(self, event: str, *arguments: Any) -> None:
        for reporter in self._reporters:
            try:
                getattr(reporter, event)(*arguments)
            except (OSError, tf.errors.OpError) as error:
                if reporter not in self._failed:
                    self._failed.add(reporter)
                    report(0, f"{type(reporter).__name__} cannot write: {error}. Training continues.")
