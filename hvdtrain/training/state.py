"""What a checkpoint keeps of a run in addition to its model, and what a resumed run must have in common with it."""

import dataclasses
from typing import Any

from hvdtrain.checkpoint.checkpointer import Checkpointer, Restored
from hvdtrain.data.sample_plan import SamplePlan
from hvdtrain.training.callbacks import RankCallbacks
from hvdtrain.training.step_runner import StepRunner


class RunState:
    """The state of a run: gathered from its parts, and restored into them."""

    def __init__(self, runner: StepRunner, callbacks: RankCallbacks):
        self._runner = runner
        self._callbacks = callbacks

    def save(self, checkpointer: Checkpointer, *, wait: bool) -> None:
        """All ranks must call it; see :meth:`~hvdtrain.Checkpointer.save`."""
        runner = self._runner
        state = {
            **self.common(),
            "strategy": runner.strategy.state(),
            "skipped_steps": runner.total(runner.record.skipped_steps()),
        }
        rank_state = {
            "bad_samples": runner.quota.places,
            "steps": runner.train_step.steps_made,
            "skipped_steps": runner.record.skipped_steps(),
            "strategy": runner.strategy.rank_state(),
        }
        checkpointer.save(
            runner.progress.step,
            state=state,
            rank_state=rank_state,
            identity=self._identity(),
            averaged=runner.strategy.averaged,
            wait=wait,
        )

    def common(self) -> dict[str, Any]:
        """What all ranks have in common, besides their model and the strategy's part; of this rank alone."""
        runner = self._runner
        return {
            "progress": runner.progress.state(),
            "callbacks": self._callbacks.state(),
            "balancing": runner.balancer.state(),
            **self._place(),
        }

    def _place(self) -> dict[str, Any]:
        """The place in the data, which the step alone does not tell if steps have had different numbers of samples."""
        runner = self._runner
        if not runner.config.rescale:
            return {}
        position = runner.plan.position(runner.progress.step)
        return {"sample": position.epoch * runner.plan.num_samples + position.sample}

    def apply_common(self, state: dict[str, Any]) -> None:
        """Takes over what :meth:`common` returned on another rank."""
        self._runner.progress.restore(state["progress"])
        self._callbacks.restore(state["callbacks"])

    def begin_plan(self, plan: SamplePlan, state: dict[str, Any]) -> SamplePlan:
        """The plan, beginning after the steps made, where :meth:`common` was returned."""
        if not self._runner.config.rescale:
            return plan
        return dataclasses.replace(plan, first_step=self._runner.progress.step, first_sample=state["sample"])

    def restore(self, checkpointer: Checkpointer, resume: str) -> Restored | None:
        """All ranks must call it; see :meth:`~hvdtrain.Checkpointer.restore`."""
        restored = checkpointer.restore(resume, identity=self._identity())
        if restored is None:
            return None
        runner = self._runner
        runner.progress.restore(restored.state["progress"])
        runner.feed.plan = self.begin_plan(runner.plan, restored.state)
        own = restored.rank_state or self._on_other_ranks(restored.state)
        runner.record.restore(own["skipped_steps"])
        runner.times.restore(own["steps"])
        runner.quota.restore(own["bad_samples"])
        runner.balancer.restore(restored.state["balancing"])
        runner.strategy.restore(restored.state["strategy"], own["strategy"])
        return restored

    def _on_other_ranks(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state of this rank if the run was saved on another number of ranks."""
        runner = self._runner
        # Independent ranks' counts are added up: rank 0 takes them all.
        counts = runner.collectives.rank == 0 or not runner.strategy.ranks_are_independent
        skipped = state["skipped_steps"] if counts else 0
        return {"bad_samples": set(), "steps": runner.progress.step, "skipped_steps": skipped, "strategy": None}

    def _identity(self) -> dict[str, Any]:
        plan, config = self._runner.plan, self._runner.config
        sync_dtype = config.local_sgd.sync_dtype
        return {
            "training data": self._runner.source.facts(),
            "samples in a step": "by the number of ranks" if config.rescale else plan.global_batch_size,
            "seed": plan.seed,
            "remainder": plan.remainder,
            "local SGD": "no" if config.mode == "sync" else str(config.local_sgd),
            # Only then, so that checkpoints of older versions can be resumed.
            **({"sync dtype": sync_dtype} if config.mode == "local" and sync_dtype != "float32" else {}),
            # Before it was computed, the order of so many samples was another one.
            **({"order": "computed"} if plan.computes_order else {}),
            **({"quorum": "yes"} if config.stragglers.is_active else {}),
        }
