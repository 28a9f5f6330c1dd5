"""Which samples a run trains on in which step, and how many steps it has."""

from hvdtrain.data import Source
from hvdtrain.data.sample_plan import SamplePlan, split_batch
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.errors import UsageError
from hvdtrain.training.config import StepConfig, TrainConfig


def sample_plan(source: Source, config: StepConfig, collectives: Collectives) -> SamplePlan:
    """Which samples this rank trains on, and in which order."""
    size, total = collectives.size, config.global_batch_size
    return SamplePlan(
        num_samples=source.num_samples,
        batch_size=config.batch_size,
        rank=collectives.rank,
        size=size,
        rank_batch_sizes=None if total is None else split_batch(total, [1] * size, total),
        seed=config.seed,
        shuffle=not source.keeps_order,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        remainder=config.remainder,
    )


def total_steps(config: TrainConfig, plan: SamplePlan) -> int:
    """The number of steps that a configuration asks for.

    Raises:
        UsageError: not exactly one of ``steps`` and ``epochs`` is set.
    """
    if (config.steps is None) == (config.epochs is None):
        raise UsageError(f"set either steps or epochs. Received: steps={config.steps}, epochs={config.epochs}")
    return config.steps if config.steps is not None else plan.first_step_of(config.epochs or 0)
