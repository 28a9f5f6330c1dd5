"""Post-local SGD (Lin et al., arXiv:1808.07217): synchronous training first, then local SGD."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from hvdtrain.checkpoint.model_state import Averaged
from hvdtrain.training.progress import Progress
from hvdtrain.training.strategies.local import LocalStrategy
from hvdtrain.training.strategies.strategy import Place, Strategy
from hvdtrain.training.strategies.sync import SyncStrategy


class PostLocalStrategy(Strategy):
    """Switches from one strategy to another after a number of steps.

    Args:
        switch_step: the number of synchronous steps.
    """

    mode = "local"
    ranks_are_independent = True

    def __init__(self, first: SyncStrategy, then: LocalStrategy, switch_step: int, progress: Progress):
        self._first = first
        self._then = then
        self._switch_step = switch_step
        self._progress = progress
        self.marks: tuple[int, ...] = (switch_step,)
        self.in_lockstep, self.waits_for_ranks = then.in_lockstep, then.waits_for_ranks

    @property
    def _has_switched(self) -> bool:
        return self._progress.step >= self._switch_step

    @property
    def _current(self) -> SyncStrategy | LocalStrategy:
        return self._then if self._has_switched else self._first

    @property
    def makes_common_steps(self) -> bool:
        return self._current.makes_common_steps

    def start(self) -> None:
        self._current.start()

    def run(self, max_steps: int) -> None:
        before = self._current
        before.run(max_steps)
        if self._current is not before:
            self._current.start()

    def synchronized(self) -> AbstractContextManager[None]:
        return self._current.synchronized()

    def compare_replicas(self) -> None:
        self._current.compare_replicas()

    def finish(self) -> None:
        self._current.finish()

    def close(self) -> None:
        self._then.close()

    @property
    def updates(self) -> int:
        return self._progress.step

    def total(self, own: int) -> int:
        return self._then.total(own)

    @property
    def averaged(self) -> Averaged | None:
        return self._current.averaged

    @property
    def bytes_reduced(self) -> int:
        return self._first.bytes_reduced + self._then.bytes_reduced

    def summary(self) -> dict[str, Any]:
        return self._then.summary()

    @property
    def position(self) -> tuple[int, int]:
        return self._current.position

    def settle(self) -> None:
        self._current.settle()

    def end_round(self) -> None:
        self._current.end_round()

    def keeps_own(self, place: Place, furthest: Place) -> bool:
        return self._current.keeps_own(place, furthest)

    def take_over(self, places: Sequence[Place], source: int, num_lost: int) -> None:
        self._current.take_over(places, source, num_lost)

    def state(self) -> dict[str, Any]:
        return self._then.state()

    def rank_state(self) -> dict[str, Any]:
        return self._then.rank_state()

    def restore(self, state: Mapping[str, Any] | None, rank_state: Mapping[str, Any] | None) -> None:
        self._then.restore(state, rank_state)
