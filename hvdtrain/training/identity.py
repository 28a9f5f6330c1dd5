"""What a resumed run must have in common with the run that saved the checkpoint."""

from typing import Any

from hvdtrain.data import Source
from hvdtrain.data.sample_plan import SamplePlan
from hvdtrain.training.config import StepConfig


def run_identity(source: Source, config: StepConfig, plan: SamplePlan) -> dict[str, Any]:
    """The facts that decide which sample is trained on when, and what a checkpoint holds of it."""
    return {
        "training data": source.facts(),
        "samples in a step": "by the number of ranks" if config.rescale else plan.global_batch_size,
        "seed": plan.seed,
        "remainder": plan.remainder,
        "local SGD": "no" if config.mode == "sync" else str(config.local_sgd),
        "quorum": "yes" if config.stragglers.is_active else "no",
    }
