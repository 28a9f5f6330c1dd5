"""The state of a run: collected from its parts by name for a checkpoint, and restored into them."""

from collections.abc import Mapping
from typing import Any, Protocol

from hvdtrain.checkpoint.checkpointer import Checkpointer, Restored
from hvdtrain.data import Source
from hvdtrain.data.feeds import TrainingFeed
from hvdtrain.data.sample_plan import SamplePlan
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.training.config import StepConfig
from hvdtrain.training.identity import run_identity
from hvdtrain.training.plan import sample_plan
from hvdtrain.training.progress import Progress
from hvdtrain.training.rescaling import continued_plan, place_in_data
from hvdtrain.training.strategies.strategy import Strategy


class Part(Protocol):
    """A part of a run that has state."""

    def state(self) -> Any:
        """Its state for a checkpoint."""

    def restore(self, state: Any) -> None:
        """Restores what :meth:`state` returned."""


class RunState:
    """What a checkpoint keeps of a run in addition to its model.

    Args:
        shared: the parts whose state is the same on every rank, by the name that it has in a checkpoint.
        own: the parts whose state differs between ranks, including ``steps`` and ``skipped_steps``.
    """

    def __init__(
        self,
        source: Source,
        config: StepConfig,
        *,
        feed: TrainingFeed,
        progress: Progress,
        shared: Mapping[str, Part],
        own: Mapping[str, Part],
        strategy: Strategy,
        collectives: Collectives,
    ):
        self._source = source
        self._config = config
        self._feed = feed
        self._progress = progress
        self._shared = {"progress": progress, **shared}
        self._own = dict(own)
        self._strategy = strategy
        self._collectives = collectives

    def save(self, checkpointer: Checkpointer, *, wait: bool) -> None:
        """All ranks must call it; see :meth:`~hvdtrain.Checkpointer.save`."""
        own = {name: part.state() for name, part in self._own.items()}
        skipped_steps = self._strategy.total(own["skipped_steps"])
        checkpointer.save(
            self._progress.step,
            state={**self.common(), "strategy": self._strategy.state(), "skipped_steps": skipped_steps},
            rank_state={**own, "strategy": self._strategy.rank_state()},
            identity=run_identity(self._source, self._config, self._feed.plan),
            averaged=self._strategy.averaged,
            wait=wait,
        )

    def common(self) -> dict[str, Any]:
        """What all ranks have in common, besides their model and the strategy's part; of this rank alone."""
        place = place_in_data(self._feed.plan, self._progress.step) if self._config.rescale else {}
        return {**{name: part.state() for name, part in self._shared.items()}, **place}

    def apply_common(self, state: Mapping[str, Any]) -> None:
        """Takes over what :meth:`common` returned on another rank."""
        for name, part in self._shared.items():
            part.restore(state[name])

    def plan_of_ranks(self, state: Mapping[str, Any]) -> SamplePlan:
        """The plan of the current ranks, which continues after the steps made, where :meth:`common` was returned."""
        return self._continued(sample_plan(self._source, self._config, self._collectives), state)

    def _continued(self, plan: SamplePlan, state: Mapping[str, Any]) -> SamplePlan:
        return continued_plan(plan, self._progress.step, state) if self._config.rescale else plan

    def restore(self, checkpointer: Checkpointer, resume: str) -> Restored | None:
        """All ranks must call it; see :meth:`~hvdtrain.Checkpointer.restore`."""
        identity = run_identity(self._source, self._config, self._feed.plan)
        restored = checkpointer.restore(resume, identity=identity)
        if restored is None:
            return None
        self.apply_common(restored.state)
        self._feed.plan = self._continued(self._feed.plan, restored.state)
        own = restored.rank_state or self._on_other_ranks(restored.state)
        for name, part in self._own.items():
            part.restore(own[name])
        self._strategy.restore(restored.state["strategy"], own["strategy"])
        return restored

    def _on_other_ranks(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state of this rank if the run was saved on another number of ranks."""
        # Independent ranks' counts are added up: rank 0 takes them all.
        counts = self._collectives.rank == 0 or not self._strategy.ranks_are_independent
        skipped_steps = state["skipped_steps"] if counts else 0
        return {"bad_samples": set(), "steps": self._progress.step, "skipped_steps": skipped_steps, "strategy": None}
