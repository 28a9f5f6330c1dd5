"""What the training loop does when the ranks of a job change: by default nothing, for they do not."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import keras

from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.elastic import ElasticCollectives
from hvdtrain.errors import UsageError
from hvdtrain.fault_tolerance.elastic.elastic_watch import ElasticWatch
from hvdtrain.fault_tolerance.job_watch import JobWatch
from hvdtrain.training.joining import Joining, MembershipChange, without_comparison
from hvdtrain.training.parts import StepParts
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


class _TrainerState:
    """The state of a trainer, as the members of an elastic job take it over; see :class:`LoopState`."""

    remedy = "Restart the job to resume it."

    def __init__(
        self,
        model: keras.Model,
        parts: StepParts,
        state: RunState,
        collectives: Collectives,
        *,
        is_newcomer: bool,
        on_undo: Callable[[], None],
    ):
        self.model = model
        self.parts = parts
        self._state = state
        self._collectives = collectives
        self._is_newcomer = is_newcomer
        self._on_undo = on_undo
        self.num_ranks = collectives.size
        """Number of ranks when this process's variables were last in sync."""
        self.history: list[dict[str, float]] = []
        """The changes since the job began, including those before this process joined."""

    def warm_up(self) -> None:
        self.parts.train_step.run(1)

    def undo(self) -> None:
        self._on_undo()
        self.parts.strategy.settle()
        self.parts.train_step.undo_interrupted()
        progress, steps_made = self.parts.progress, self.parts.train_step.steps_made
        if self.parts.strategy.in_lockstep:
            progress.reduced_steps += steps_made - progress.step
            progress.step = steps_made

    def place(self, *, has_state: bool) -> Place:
        progress = self.parts.progress
        rounds, steps_in_round = self.parts.strategy.position
        return Place(
            has_state=has_state,
            step=progress.step,
            is_between_calls=progress.is_between_calls,
            is_logged=progress.is_logged,
            rounds=rounds,
            steps_in_round=steps_in_round,
        )

    def shared(self) -> Any:
        return self._state.common(), self.num_ranks, self.history

    def keeps_own(self, places: Sequence[tuple[Any, ...]], own: int, source: int) -> bool:
        return self.parts.strategy.keeps_own(Place(*places[own]), Place(*places[source]))

    def take_over(self, places: Sequence[tuple[Any, ...]], source: int, shared: Any) -> None:
        progress, strategy = self.parts.progress, self.parts.strategy
        epoch = progress.epoch, progress.is_in_epoch
        state, num_ranks, self.history = shared
        num_with_state = sum(Place(*place).has_state for place in places)
        strategy.take_over([Place(*place) for place in places], source, num_ranks - num_with_state)
        if not all(self.keeps_own(places, rank, source) for rank in range(len(places))):
            self.num_ranks = num_ranks
        if self._collectives.rank != source:
            self._state.apply_common(state)
        if self._is_newcomer or epoch != (progress.epoch, progress.is_in_epoch):
            self.model.reset_metrics()

    def resume(self, shared: Any) -> None:
        """Divides the samples among these ranks."""
        self._is_newcomer = False
        state, *_ = shared
        self.parts.restart_with(self._state.plan_of_ranks(state))


class ElasticMembers:
    """The members of an elastic job, which change while it trains.

    Args:
        on_change: called when other ranks train together from now on, with their number and the seconds that passed,
            and the number of ranks before.
        on_leave: called before this process, which leaves the job, ends.
    """

    def __init__(
        self,
        state: _TrainerState,
        collectives: ElasticCollectives,
        watch: ElasticWatch,
        *,
        on_change: Callable[[Mapping[str, float], int], None],
        on_leave: Callable[[], None],
    ):
        self._state = state
        self._parts = state.parts
        self._coordinator = watch.coordinator
        self._collectives = collectives
        self._on_change = on_change
        self._joining = Joining(state, self._coordinator, collectives, on_leave=on_leave)

    @property
    def is_newcomer(self) -> bool:
        return self._joining.is_newcomer

    def prepare(self) -> None:
        """A newcomer compiles its step alone, by making one; then it joins the others."""
        if not self._parts.strategy.ranks_are_independent:
            self._parts.train_step.keep_snapshot()
        step = self._parts.train_step
        step.use_pipelines(without_comparison(step.pipelines))
        self._joining.start()
        if self.is_newcomer:
            self.rejoin()

    def pause_if_due(self) -> None:
        if self._coordinator.must_hold:
            if not self._coordinator.is_cut:
                self._parts.strategy.end_round()
            raise MembershipChange

    def is_over(self, error: Exception) -> bool:
        return self._joining.is_over(error)

    def rejoin(self) -> None:
        start_s = time.monotonic()
        self._joining.rejoin()
        state, size = self._state, self._collectives.size
        change = {"ranks": size, "pause_seconds": time.monotonic() - start_s}
        state.history.append({"step": self._parts.progress.step, **change})
        ranks_before, state.num_ranks = state.num_ranks, size
        self._on_change(change, ranks_before)

    def summary(self) -> dict[str, Any]:
        pause_seconds = sum(change["pause_seconds"] for change in self._state.history)
        return {"membership_changes": self._state.history, "membership_seconds": pause_seconds}


def make_members(
    model: keras.Model,
    parts: StepParts,
    state: RunState,
    collectives: Collectives,
    watch: JobWatch,
    *,
    on_undo: Callable[[], None],
    on_change: Callable[[Mapping[str, float], int], None],
    on_leave: Callable[[], None],
) -> Members:
    """The members of the job that this process belongs to; see :class:`ElasticMembers`.

    Args:
        on_undo: called when the collectives have been cut, or are idle, before this process connects to other ranks.

    Raises:
        UsageError: the collectives do not allow other ranks.
    """
    if not isinstance(watch, ElasticWatch):
        return FixedMembers()
    if not isinstance(collectives, ElasticCollectives):
        raise UsageError("an elastic job needs its own collectives. Received: others. Leave collectives out.")
    is_newcomer = watch.coordinator.must_warm_up
    shared = _TrainerState(model, parts, state, collectives, is_newcomer=is_newcomer, on_undo=on_undo)
    return ElasticMembers(shared, collectives, watch, on_change=on_change, on_leave=on_leave)
