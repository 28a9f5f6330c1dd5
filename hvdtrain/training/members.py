"""What the training loop does when the ranks of a job change: by default nothing, for they do not."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import keras

from hvdtrain.data import Source
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.elastic import ElasticCollectives
from hvdtrain.distributed.replica_consistency import global_stream, own_random_stream, random_streams
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.fault_tolerance.elastic.elastic_watch import ElasticWatch
from hvdtrain.fault_tolerance.elastic.rejoin import MembershipChange, is_over, rejoin
from hvdtrain.fault_tolerance.job_watch import JobWatch
from hvdtrain.optim.global_loss import end_checks
from hvdtrain.training.config import StepConfig
from hvdtrain.training.parts import StepParts
from hvdtrain.training.plan import sample_plan
from hvdtrain.training.state import RunState
from hvdtrain.training.strategies.strategy import Place


class Members(Protocol):
    """The ranks that train together."""

    @property
    def is_newcomer(self) -> bool:
        """Whether this process joins a job that trains already."""

    def prepare(self) -> None:
        """Call it when the step can be compiled, before the first one."""

    def pause_if_due(self) -> None:
        """Raises MembershipChange if all ranks hold at this point of the run."""

    def is_over(self, error: Exception) -> bool:
        """Whether an error means that the ranks change."""

    def rejoin(self) -> None:
        """Continues with other ranks, at the last step that any of them has completed."""

    def summary(self) -> dict[str, Any]:
        """Its part of a run's ``summary.json``."""


class FixedMembers:
    """The ranks that the launcher started."""

    is_newcomer = False

    def prepare(self) -> None:
        pass

    def pause_if_due(self) -> None:
        pass

    def is_over(self, error: Exception) -> bool:
        return False

    def rejoin(self) -> None:
        raise AssertionError("the ranks of this job do not change")

    def summary(self) -> dict[str, Any]:
        return {}


class ElasticMembers:
    """The members of an elastic job, which change while it trains.

    Args:
        on_change: called when other ranks train together from now on, with their number and the seconds that passed,
            and the number of ranks before.
        on_leave: called before this process, which leaves the job, ends.
    """

    def __init__(
        self,
        model: keras.Model,
        source: Source,
        config: StepConfig,
        *,
        parts: StepParts,
        state: RunState,
        collectives: Collectives,
        watch: ElasticWatch,
        on_change: Callable[[Mapping[str, float], int], None],
        on_leave: Callable[[], None],
    ):
        if not isinstance(collectives, ElasticCollectives):
            raise UsageError("an elastic job needs its own collectives. Received: others. Leave collectives out.")
        self._model = model
        self._source = source
        self._config = config
        self._parts = parts
        self._state = state
        self._watch = watch
        self._coordinator = watch.coordinator
        self._collectives = collectives
        self._on_change = on_change
        self._on_leave = on_leave
        self.is_newcomer = self._coordinator.must_warm_up
        self._has_state = not self._coordinator.must_warm_up
        self._num_ranks = collectives.size
        """The ranks that this process last trained with, or those of which it has its variables."""
        self._history: list[dict[str, float]] = []
        """The changes since the job began: those that this process has not seen are another rank's."""

    def prepare(self) -> None:
        """A newcomer compiles its step alone, by making one; then it joins the others."""
        if not self._parts.strategy.ranks_are_independent:
            self._parts.train_step.keep_snapshot()
        # Replicas are equal. Comparing them in the first step would wait for newcomers, which make theirs alone.
        step = self._parts.train_step
        step.use_pipelines([(leaf, dataclasses.replace(pipeline, start=None)) for leaf, pipeline in step.pipelines])
        self._coordinator.cut_with(self._collectives.cut)
        if self.is_newcomer:
            self._parts.train_step.run(1)
            # Streams of its own, as ranks have from the start: see replica_consistency.broadcast.
            for stream in [*random_streams(self._model), global_stream()]:
                stream.assign(own_random_stream(stream.numpy(), self._coordinator.number))
            self._coordinator.is_ready()
            self.rejoin()

    def pause_if_due(self) -> None:
        if self._coordinator.must_hold:
            if not self._coordinator.is_cut:
                self._parts.strategy.end_round()
            raise MembershipChange

    def is_over(self, error: Exception) -> bool:
        return is_over(error, self._coordinator)

    def rejoin(self) -> None:
        start_s = time.monotonic()
        rejoin(self._coordinator, self._collectives, settle=self._settle, on_leave=self._on_leave)
        change = {"ranks": self._collectives.size, "pause_seconds": time.monotonic() - start_s}
        self._history.append({"step": self._parts.progress.step, **change})
        ranks_before, self._num_ranks = self._num_ranks, self._collectives.size
        self._on_change(change, ranks_before)

    def _settle(self) -> None:
        """Makes the state of all members that of the furthest one, and divides the samples among them."""
        parts, collectives = self._parts, self._collectives
        parts.train_step.undo_interrupted()
        progress = parts.progress
        progress.reduced_steps += parts.train_step.steps_made - progress.step
        progress.step = parts.train_step.steps_made
        epoch = progress.epoch, progress.is_in_epoch
        strategy = parts.strategy
        rounds, steps_in_round = strategy.position
        is_done = progress.is_between_calls, progress.is_logged
        own = Place(self._has_state, rounds, progress.step, *is_done, steps_in_round)
        places = [Place(*each) for each in collectives.allgather(tuple(own))]
        source = places.index(max(places))
        if not places[source].has_state:
            raise HvdtrainError(
                "the state of the run was lost with the ranks that had it. Restart the job to resume it."
            )
        is_source = collectives.rank == source
        shared = (self._state.common(), self._num_ranks, self._history) if is_source else None
        state, num_ranks, self._history = collectives.allgather(shared)[source]
        # Until all of it has arrived, a state that is taken over is neither the old one nor the new one.
        self._has_state = is_source or strategy.keeps_own(own, places[source])
        strategy.take_over(places, source, num_ranks - sum(place.has_state for place in places))
        if not all(strategy.keeps_own(place, places[source]) for place in places):
            self._num_ranks = num_ranks
        if not is_source:
            self._state.apply_common(state)
        if self.is_newcomer or epoch != (progress.epoch, progress.is_in_epoch):
            self._model.reset_metrics()
        self.is_newcomer, self._has_state = False, True
        end_checks()
        parts.restart_with(self._state.continued(sample_plan(self._source, self._config, collectives), state))

    def summary(self) -> dict[str, Any]:
        pause_seconds = sum(change["pause_seconds"] for change in self._history)
        return {"membership_changes": self._history, "membership_seconds": pause_seconds}


def make_members(
    model: keras.Model,
    source: Source,
    config: StepConfig,
    *,
    parts: StepParts,
    state: RunState,
    collectives: Collectives,
    watch: JobWatch,
    on_change: Callable[[Mapping[str, float], int], None],
    on_leave: Callable[[], None],
) -> Members:
    """The members of the job that this process belongs to; see :class:`ElasticMembers`."""
    if not isinstance(watch, ElasticWatch):
        return FixedMembers()
    return ElasticMembers(
        model,
        source,
        config,
        parts=parts,
        state=state,
        collectives=collectives,
        watch=watch,
        on_change=on_change,
        on_leave=on_leave,
    )
