"""Ranks in step: gradients are averaged at every one, so that replicas are equal."""

import dataclasses
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import keras

from hvdtrain import replicas
from hvdtrain.averaging import ParameterAverager
from hvdtrain.checkpoint import Averaged
from hvdtrain.collectives import Collectives
from hvdtrain.failure import JobWatch
from hvdtrain.modes.calls import TrainingCalls
from hvdtrain.progress import Progress
from hvdtrain.sampling import SamplePlan
from hvdtrain.timing.step_times import TimeShares


@dataclasses.dataclass(frozen=True)
class Training:
    """What a mode works on."""

    model: keras.Model
    plan: SamplePlan
    progress: Progress
    calls: TrainingCalls
    collectives: Collectives
    shares: TimeShares
    job: JobWatch


class SyncMode:
    """Training as one process would do it on all samples of a step."""

    averager: ParameterAverager | None = None
    marks: tuple[int, ...] = ()
    """Steps after which a call has to end."""

    def __init__(self, training: Training):
        self._model = training.model
        self._plan = training.plan
        self._progress = training.progress
        self._calls = training.calls
        self._collectives = training.collectives
        self._shares = training.shares
        self._job = training.job

    def begin(self) -> None:
        """Before the first step, when replicas are equal or restored."""

    def make_call(self, longest: int) -> None:
        """Makes one call of steps, at most ``longest``, and counts them."""
        steps = min(longest, self._calls.longest)
        self._make(steps)
        self._progress.reduced_steps += steps

    def _make(self, steps: int) -> None:
        self._job.beat("training", self._progress.step)
        self._calls.make(steps)
        self._progress.step += steps
        self._shares.made(steps)

    def shared(self) -> AbstractContextManager[None]:
        """In it the model is that of all ranks together."""
        return replicas.shared_statistics(self._model, self._collectives)

    def compare_replicas(self) -> None:
        """Raises DivergenceError where replicas differ that must be equal."""
        replicas.require_equal_replicas(self._model, self._collectives, self._progress.step)

    def finish(self) -> None:
        """After the last step: what is averaged stays."""

    @property
    def averaged(self) -> Averaged | None:
        """Where each rank has a replica of its own: in which the model is that of all ranks."""
        return None

    def state(self) -> dict[str, Any] | None:
        """What a checkpoint keeps of all ranks together."""
        return None

    def rank_state(self) -> dict[str, Any] | None:
        """What a checkpoint keeps of this rank, beside its variables."""
        return None

    def restore(self, state: Mapping[str, Any] | None, rank_state: Mapping[str, Any] | None) -> None:
        """Takes over what these gave; ``rank_state`` is None on another number of ranks."""
