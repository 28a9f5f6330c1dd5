"""What a checkpoint keeps of a run beside its model, and what must be the same where one goes on."""

from collections.abc import Mapping
from typing import Any

from hvdtrain.averaging import LocalTraining
from hvdtrain.callbacks import RankCallbacks
from hvdtrain.checkpoint import Checkpointer, Restored
from hvdtrain.data import Source
from hvdtrain.data.bad_samples import BadSampleQuota
from hvdtrain.gradient_watch import GradientWatch
from hvdtrain.modes import SyncMode
from hvdtrain.progress import Progress
from hvdtrain.sampling import SamplePlan
from hvdtrain.steps import CompiledSteps


class RunState:
    """How far a run has come, gathered from its parts and put back into them.

    Args:
        identity: what the run must have in common with the one it goes on from, beside data, order and model.
    """

    def __init__(
        self,
        progress: Progress,
        gradients: GradientWatch,
        callbacks: RankCallbacks,
        quota: BadSampleQuota,
        steps: CompiledSteps,
        mode: SyncMode,
        *,
        plan: SamplePlan,
        training: Source,
        local: LocalTraining | None,
        identity: Mapping[str, Any],
    ):
        self._progress = progress
        self._gradients = gradients
        self._callbacks = callbacks
        self._quota = quota
        self._steps = steps
        self._mode = mode
        self._plan = plan
        self._training = training
        self._local = local
        self._asked_identity = dict(identity)

    def save(self, checkpointer: Checkpointer, *, wait: bool) -> None:
        """Every rank has to call it; see :meth:`~hvdtrain.checkpoint.Checkpointer.save`."""
        state = {
            "progress": self._progress.state(),
            "skipped_steps": self._gradients.skipped_steps(),
            "callbacks": self._callbacks.state(),
            "mode": self._mode.state(),
        }
        rank_state = {
            "bad samples": self._quota.places,
            "steps": self._steps.steps_made,
            "mode": self._mode.rank_state(),
        }
        checkpointer.save(
            self._progress.step,
            state=state,
            rank_state=rank_state,
            identity=self._identity(),
            averaged=self._mode.averaged,
            wait=wait,
        )

    def restore(self, checkpointer: Checkpointer, resume: str) -> Restored | None:
        """Every rank has to call it; see :meth:`~hvdtrain.checkpoint.Checkpointer.restore`."""
        restored = checkpointer.restore(resume, identity=self._identity())
        if restored is None:
            return None
        self._progress.restore(restored.state["progress"])
        self._gradients.restore(restored.state["skipped_steps"])
        own = restored.rank_state or {"bad samples": set(), "steps": self._progress.step, "mode": None}
        self._steps.times.restore(own["steps"])
        self._quota.restore(own["bad samples"])
        self._mode.restore(restored.state["mode"], own["mode"])
        return restored

    def _identity(self) -> dict[str, Any]:
        plan = self._plan
        return {
            **self._asked_identity,
            "training data": self._training.facts(),
            "samples in a step": plan.global_batch_size,
            "seed": plan.seed,
            "remainder": plan.remainder,
            "local training": "no" if self._local is None else str(self._local),
        }
