"""Ranks by themselves: each makes its own steps, and parameters are averaged now and then."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from hvdtrain import process, replicas
from hvdtrain.averaging import LocalTraining, ParameterAverager
from hvdtrain.checkpoint import Averaged
from hvdtrain.collectives import Collectives, OneProcess
from hvdtrain.metrics import LossSince
from hvdtrain.modes.sync import SyncMode, Training
from hvdtrain.optimizer import leaves, reduce_among


class LocalMode(SyncMode):
    """Local training, after as many steps in sync mode as are asked for."""

    averager: ParameterAverager

    def __init__(self, training: Training, options: LocalTraining, total_steps: int):
        super().__init__(training)
        self._options = options
        self._total_steps = total_steps
        self.marks = (options.after,)
        self.averager = ParameterAverager(
            self._model,
            options,
            collectives=self._collectives,
            deterministic=process.is_deterministic(),
            starts=False,
        )
        self._losses = LossSince(self._model) if options.schedule == "adacomm" else None

    @property
    def _is_alone(self) -> bool:
        return self._progress.step >= self._options.after

    def begin(self) -> None:
        if self._is_alone:
            self._part()

    def _part(self) -> None:
        """From here on each rank trains alone."""
        reduce_among(self._model.optimizer, self._among())
        self.averager.start()
        self._calls.train_alone()

    def _among(self) -> Collectives:
        """The ranks whose gradients are averaged at each step all the same."""
        if self._options.across == "host":
            return self._collectives.of_host()
        return OneProcess(self._collectives.rank)

    def make_call(self, longest: int) -> None:
        if not self._is_alone:
            super().make_call(longest)
            if self._is_alone:
                self._part()
        elif self._options.wait_free:
            self._make_round()
        else:
            steps = min(longest, self._calls.longest, self.averager.steps_to_round_end)
            self._make(steps)
            self._average(steps)

    def _make_round(self) -> None:
        """Makes steps until every rank has made its own; as many as there is time for."""
        progress = self._progress
        is_open = True
        while is_open:
            steps = min(self._calls.longest, self.averager.steps_to_round_end)
            self._job.beat("training", progress.step)
            self._calls.make(steps)
            is_open = not self._average(steps)
        made = self._options.after + self.averager.total_steps // self._collectives.size
        progress.step = min(self._total_steps, max(progress.step, made))
        for leaf in leaves(self._model.optimizer):
            # A schedule of the learning rate goes by how far the run has come, not by how fast this rank is.
            leaf._iterations.assign(progress.step)

    def _average(self, steps: int) -> bool:
        """Tells the averager of steps; gives back whether a round has ended."""
        samples = self._plan.own_samples(self._calls.steps_made - steps, steps)
        loss = 0.0 if self._losses is None else steps * self._losses.mean()
        return self.averager.step(samples, steps=steps, loss=loss, stop=self._job.stop_is_coming)

    def shared(self) -> AbstractContextManager[None]:
        return self.averager.averaged() if self._is_alone else super().shared()

    def compare_replicas(self) -> None:
        if not self._is_alone:
            super().compare_replicas()
        elif self.averager.is_level:
            step = self._progress.step
            replicas.require_equal_replicas(self._model, self._collectives, step, weights_only=True)

    def finish(self) -> None:
        if self._is_alone:
            if not self.averager.is_level:
                self.averager.finish()
            self.compare_replicas()

    @property
    def averaged(self) -> Averaged | None:
        return self.averager.averaged if self._is_alone else None

    def state(self) -> dict[str, Any]:
        return self.averager.state()

    def rank_state(self) -> dict[str, Any]:
        return self.averager.rank_state()

    def restore(self, state: Mapping[str, Any] | None, rank_state: Mapping[str, Any] | None) -> None:
        assert state is not None
        self.averager.restore(state, rank_state)
