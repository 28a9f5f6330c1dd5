"""Local SGD: each rank trains its own replica, and parameters are averaged periodically."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from hvdtrain.checkpoint.model_state import Averaged
from hvdtrain.config.wording import option
from hvdtrain.distributed import replica_consistency
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.optimizers import leaves_of, optimizer_variables
from hvdtrain.distributed.single_process import SingleProcessCollectives
from hvdtrain.distributed.snapshot import host_tensor
from hvdtrain.errors import UsageError
from hvdtrain.local_sgd.averager import OwnRound, ParameterAverager
from hvdtrain.local_sgd.config import LocalSGDConfig
from hvdtrain.optim.pipeline import in_scope
from hvdtrain.seams import keras_internals
from hvdtrain.system import devices
from hvdtrain.system.terminal import report
from hvdtrain.training.config import RecordConfig
from hvdtrain.training.joining import MembershipChange
from hvdtrain.training.metrics import LossOfSteps
from hvdtrain.training.round_record import RoundRecord, read_own_rounds
from hvdtrain.training.strategies.strategy import Place, Strategy, StrategyContext


class LocalStrategy(Strategy):
    """Trains each rank on its own samples, and averages parameters in rounds."""

    mode = "local"
    marks: tuple[int, ...] = ()
    ranks_are_independent = True

    def __init__(self, context: StrategyContext, config: LocalSGDConfig, recording: RecordConfig, total_steps: int):
        self._model = context.model
        self._plan = context.plan
        self._progress = context.progress
        self._train_step = context.train_step
        self._collectives = context.collectives
        self._job_watch = context.job_watch
        self._config = config
        self._total_steps = total_steps
        self.in_lockstep = self.waits_for_ranks = not config.wait_free
        self._replay = recording.replay
        self._record = None if recording.record is None else RoundRecord(recording.record, self._collectives)
        self._averager = ParameterAverager(
            self._model,
            config,
            collectives=self._collectives,
            deterministic=devices.is_deterministic(),
            starts=False,
            on_round_ended=self._round_ended,
        )
        self._own_collectives = SingleProcessCollectives(self._collectives.rank)
        self._counted_from = config.sync_steps_first, 0
        """With ``wait_free``: the progress when these ranks began to train together, and the steps averaged by then."""
        self._lost_steps = 0
        self._losses = LossOfSteps(self._model) if config.sync_schedule == "adacomm" else None

    @property
    def makes_common_steps(self) -> bool:
        return False

    def start(self) -> None:
        """From here on ranks train independently."""
        if self._replay is not None:
            self._averager.replay(read_own_rounds(self._replay, self._collectives))
        if self._record is not None:
            self._record.start(self._averager.ended_rounds)
        self._train_step.train_over(self._step_collectives())
        with in_scope(self._train_step.pipelines):
            self._averager.start()

    def _round_ended(self, own: OwnRound) -> None:
        if self._record is not None:
            self._record.add(own)

    def _step_collectives(self) -> Collectives:
        """The ranks whose gradients are still averaged at every step."""
        if self._config.average_across == "host":
            on_host = self._collectives.host_collectives()
            if on_host is self._collectives:
                raise UsageError(
                    f"{option('average_across', 'host')} needs ranks on several hosts. Received: all "
                    f"{self._collectives.size} ranks on one host. Use {option('mode', 'sync')} or "
                    f"{option('average_across', 'rank')}."
                )
            return on_host
        return self._own_collectives

    def run(self, max_steps: int) -> None:
        if self._config.wait_free:
            self._run_round()
            return
        steps = min(max_steps, self._train_step.max_steps, self._averager.steps_until_due)
        self._make_steps(steps)
        self._progress.step += steps
        self.average_if_due(steps)

    def _run_round(self) -> None:
        """Makes the rounds of a cycle: in each, steps until all ranks end it; faster ranks make more."""
        progress = self._progress
        is_open = True
        while is_open:
            steps = min(self._train_step.max_steps, self._averager.steps_until_due)
            self._job_watch.heartbeat("training", progress.step)
            if self._job_watch.is_cut:
                raise MembershipChange
            self._make_steps(steps)
            is_open = not (self.average_if_due(steps) and self._averager.is_between_cycles)
        progress.step = min(self._total_steps, max(progress.step, self._steps_of_all()))
        for leaf in leaves_of(self._model):
            # A learning-rate schedule follows the progress of the run, not the speed of this rank.
            keras_internals.ITERATIONS.of(leaf).assign(progress.step)

    def _steps_of_all(self) -> int:
        """The steps that these ranks would have made if they had made them together."""
        step, averaged_before = self._counted_from
        return step + (self._averager.total_steps - averaged_before) // self._collectives.size

    def _make_steps(self, steps: int) -> None:
        if self._losses is not None:
            self._losses.begin()
        self._train_step.run(steps)

    def average_if_due(self, steps: int) -> bool:
        """Passes the last steps to the averager; returns whether a round has ended with them."""
        samples, loss = self._results_of(steps)
        return self._averager.step(samples, steps=steps, loss=loss, stop=self._job_watch.stop_requested)

    def _results_of(self, steps: int) -> tuple[int, float]:
        """Number of samples of the last steps, and the sum of their losses if it is needed."""
        samples = self._plan().own_samples(self._train_step.steps_made - steps, steps)
        return samples, 0.0 if self._losses is None else steps * self._losses.mean()

    def synchronized(self) -> AbstractContextManager[None]:
        return self._averager.averaged()

    def compare_replicas(self) -> None:
        if self._averager.in_sync:
            replica_consistency.require_equal_replicas(
                self._model, self._collectives, self._progress.step, weights_only=True
            )

    def finish(self) -> None:
        if not self._averager.in_sync:
            self._averager.finish()
        if self._record is not None:
            self._record.write()
        self.compare_replicas()

    @property
    def position(self) -> tuple[int, int]:
        return self._averager.position

    def settle(self) -> None:
        self._averager.settle()

    def end_round(self) -> None:
        self._averager.average_all()

    def keeps_own(self, place: Place, furthest: Place) -> bool:
        return place.has_state

    def take_over(self, places: Sequence[Place], source: int, num_lost: int) -> None:
        rank, furthest = self._collectives.rank, places[source]
        self._own_collectives.rank = rank
        # While averages are computed in the background, another rank may be further in steps.
        averaged = max(places, key=lambda place: (place.has_state, place.rounds, place.step))
        steps_in_round = averaged.steps_in_round + (furthest.step - averaged.step if self.in_lockstep else 0)
        if not all(place.has_state for place in places):
            self._share_variables(places[rank], source)
        if any(not place.has_state or place.rounds != averaged.rounds for place in places):
            self._share_average(places[rank], averaged, places.index(averaged), furthest.step - averaged.step)
        if not places[rank].has_state:
            self._train_step.skip_to(furthest.step)
        if self.in_lockstep:
            self._catch_up(furthest.step)
        if lost := num_lost * steps_in_round:
            self._lost_steps += lost
            if rank == 0:
                where = f"before step {furthest.step + 1}: those since the last average"
                number = lost if self.in_lockstep else f"about {lost}"
                report(0, f"lost {number} local step(s) of {num_lost} rank(s) {where}")
        if self.in_lockstep:
            self._averager.end_round_if_due()
        else:
            self._counted_from = furthest.step, self._averager.total_steps
        self._averager.connect()

    def _catch_up(self, step: int) -> None:
        """Makes the steps that others have made; samples are still assigned to the previous ranks."""
        while (behind := step - self._train_step.steps_made) > 0:
            steps = min(behind, self._train_step.max_steps)
            self._make_steps(steps)
            samples, loss = self._results_of(steps)
            self._averager.record(samples, steps, loss)

    def _share_variables(self, own: Place, source: int) -> None:
        """Replaces the variables of newcomers, including per-rank ones such as slots."""
        variables = [*self._model.weights, *optimizer_variables(self._model)]
        kept = [(each, host_tensor(each)) for each in variables] if own.has_state else []
        try:
            self._collectives.broadcast([each.value for each in variables], root_rank=source)
        finally:
            for variable, value in kept:
                variable.assign(value)

    def _share_average(self, own: Place, averaged: Place, source: int, steps_since: int) -> None:
        """Gives the last average to newcomers, which start from it, and to ranks that have contributed but not received
        it."""
        is_source = self._collectives.rank == source
        shared = (self.state(), self._averager.round_in_progress()) if is_source else None
        state, in_progress = self._collectives.allgather(shared)[source]
        if not own.has_state:
            self._lost_steps = state["lost_steps"]
            self._averager.start_round(state, in_progress, steps_since=steps_since)
        elif own.rounds < averaged.rounds:
            self._averager.adopt(state)

    @property
    def updates(self) -> int:
        return self._progress.step

    def close(self) -> None:
        self._averager.disconnect()
        if self._record is not None:
            self._record.close()

    def total(self, own: int) -> int:
        return sum(self._collectives.allgather(own))

    @property
    def averaged(self) -> Averaged | None:
        return self._averager.averaged

    @property
    def bytes_reduced(self) -> int:
        return self._averager.bytes_reduced

    def summary(self) -> dict[str, Any]:
        return {**self._averager.summary(), "lost_steps": self._lost_steps}

    def state(self) -> dict[str, Any]:
        if self._record is not None:
            self._record.write()
        return {**self._averager.state(), "lost_steps": self._lost_steps, "counted_from": self._counted_from}

    def rank_state(self) -> dict[str, Any]:
        return self._averager.rank_state()

    def restore(self, state: Mapping[str, Any] | None, rank_state: Mapping[str, Any] | None) -> None:
        assert state is not None
        self._averager.restore(state, rank_state)
        self._lost_steps = state["lost_steps"]
        step, averaged_before = state["counted_from"]
        if rank_state is None:
            # Other ranks than before.
            step = max(self._progress.step, self._config.sync_steps_first)
            averaged_before = self._averager.total_steps
        self._counted_from = step, averaged_before
