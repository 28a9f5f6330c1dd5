"""Synchronous training: gradients are averaged at every step, so that replicas are equal."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from hvdtrain.checkpoint.model_state import Averaged
from hvdtrain.distributed import replica_consistency
from hvdtrain.distributed.optimizers import optimizer_variables, optimizers_of
from hvdtrain.optim.distributed_optimizer import compression_memories, gradient_bytes
from hvdtrain.training.strategies.strategy import Place, Strategy, StrategyContext


class SyncStrategy(Strategy):
    """Trains as one process would on all samples of a step."""

    mode = "sync"
    marks: tuple[int, ...] = ()
    in_lockstep = True
    ranks_are_independent = False

    def __init__(self, context: StrategyContext):
        self._model = context.model
        self._progress = context.progress
        self._train_step = context.train_step
        self._collectives = context.collectives

    def start(self) -> None:
        """Nothing to do: replicas are equal."""

    def run(self, max_steps: int) -> None:
        steps = min(max_steps, self._train_step.max_steps)
        self._train_step.run(steps)
        self._progress.step += steps
        self._progress.reduced_steps += steps

    def synchronized(self) -> AbstractContextManager[None]:
        return replica_consistency.shared_statistics(self._model, self._collectives)

    def compare_replicas(self) -> None:
        replica_consistency.require_equal_replicas(self._model, self._collectives, self._progress.step)

    def finish(self) -> None:
        """Nothing to do: replicas are equal."""

    @property
    def updates(self) -> int:
        return self._progress.step

    @property
    def averaged(self) -> Averaged | None:
        return None

    @property
    def bytes_reduced(self) -> int:
        updates = self._progress.reduced_steps
        return sum(gradient_bytes(each, updates) for each in optimizers_of(self._model))

    def summary(self) -> dict[str, Any]:
        return {"averaging_rounds": 0}

    def keeps_own(self, place: Place, furthest: Place) -> bool:
        return (place.has_state, place.step) == (furthest.has_state, furthest.step)

    def take_over(self, places: Sequence[Place], source: int, num_lost: int) -> None:
        memories = compression_memories(self._model)
        if not all(self.keeps_own(place, places[source]) for place in places):
            variables = [*self._model.weights, *optimizer_variables(self._model)]
            variables += [each for memory in memories for each in memory.shared.values()]
            self._collectives.broadcast([each.value for each in variables], root_rank=source)
        for memory in memories:
            own = places[self._collectives.rank]
            memory.change_ranks(len(places), keeps_errors=self.keeps_own(own, places[source]))
        self._train_step.skip_to(places[source].step)

    def state(self) -> dict[str, Any] | None:
        return None

    def rank_state(self) -> dict[str, Any] | None:
        return None

    def restore(self, state: Mapping[str, Any] | None, rank_state: Mapping[str, Any] | None) -> None:
        pass
