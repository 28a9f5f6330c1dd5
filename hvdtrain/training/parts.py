"""The parts that make training steps, each made once from a complete configuration."""

import dataclasses
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.data import Source
from hvdtrain.data.bad_samples import BadSampleQuota
from hvdtrain.data.feeds import TrainingFeed
from hvdtrain.data.sample_plan import SamplePlan
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.optimizers import leaves_of, optimizers_of
from hvdtrain.errors import UsageError
from hvdtrain.fault_tolerance.job_watch import JobWatch
from hvdtrain.optim.distributed_optimizer import require_distributed
from hvdtrain.optim.keras_calls import synchronize_batch_normalization
from hvdtrain.optim.pipeline import require_pipeline
from hvdtrain.system import devices, network
from hvdtrain.training.config import StepConfig
from hvdtrain.training.gradient_record import GradientRecord
from hvdtrain.training.load_balancing import LoadBalancer
from hvdtrain.training.losses import sums_over_batch
from hvdtrain.training.progress import Progress
from hvdtrain.training.quorum.feed import QuorumFeed
from hvdtrain.training.resolution import Resolved
from hvdtrain.training.step_times import StepTimes, TimeShares
from hvdtrain.training.strategies.factory import make_strategy
from hvdtrain.training.strategies.strategy import Strategy, StrategyContext
from hvdtrain.training.tracing import build_by_tracing
from hvdtrain.training.train_step import LossWeights, TrainStep


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepParts:
    """The parts that make the steps of a run. Each component receives only those that it needs."""

    feed: TrainingFeed
    quota: BadSampleQuota
    times: StepTimes
    time_shares: TimeShares
    balancer: LoadBalancer
    record: GradientRecord
    train_step: TrainStep
    progress: Progress
    strategy: Strategy
    requires_metrics: bool
    """Whether metrics must have their variables before the first step: a rank may get a sample of weight zero."""
    num_synchronized: int
    """Batch normalization layers whose statistics are those of all ranks' samples."""

    def restart_with(self, plan: SamplePlan) -> None:
        """Continues after the steps made so far with a different assignment of samples to ranks."""
        self.feed.plan = plan
        self.feed.start(self.train_step.steps_made * plan.gradient_accumulation_steps)
        self.time_shares.restart()
        self.balancer.restart(plan.rank)


def make_parts(
    model: keras.Model,
    source: Source,
    plan: SamplePlan,
    resolved: Resolved[StepConfig],
    *,
    collectives: Collectives,
    job_watch: JobWatch,
    record: GradientRecord,
    total_steps: int,
) -> StepParts:
    """Makes the parts; builds the model if it is not built, and makes its optimizers distributed if they are not.

    Args:
        record: receives what the steps find in the gradients.
        total_steps: of the run.

    Raises:
        UsageError: model, data and configuration do not fit together.
    """
    config = resolved.config
    accumulation = config.gradient_accumulation_steps
    progress = Progress()
    quota = BadSampleQuota(config.guards.bad_samples, collectives)
    device = devices.own_gpu() if config.prefetch_to_device else None
    feed = (QuorumFeed if config.stragglers.is_active else TrainingFeed)(source, plan, quota, device)
    times = StepTimes(accumulation)
    time_shares = TimeShares(times, collectives, network.host_name())
    balancer = LoadBalancer(config.balancing, feed, time_shares, ranks_may_change=collectives.may_change)
    _require_samples(model, feed.element_spec)
    build_by_tracing(model, feed.element_spec)
    for optimizer in optimizers_of(model):
        require_distributed(optimizer, accumulation, collectives)
    resolved.require_compatible_reduction(model)
    weights = _loss_weights(model, config, feed.plan, collectives, quota)
    train_step = TrainStep(
        model,
        feed,
        config,
        times=times,
        record=record,
        weights=weights,
        jit_compile_is_optional=resolved.jit_compile_is_optional,
    )
    num_synchronized = synchronize_batch_normalization(
        model,
        all_layers=config.sync_batchnorm,
        collectives=collectives,
        sample_weight=train_step.sample_weight,
        gradient_weight=train_step.gradient_weight,
    )
    context = StrategyContext(
        model=model,
        plan=lambda: feed.plan,
        progress=progress,
        feed=feed,
        train_step=train_step,
        collectives=collectives,
        job_watch=job_watch,
    )
    return StepParts(
        feed=feed,
        quota=quota,
        times=times,
        time_shares=time_shares,
        balancer=balancer,
        record=record,
        train_step=train_step,
        progress=progress,
        strategy=make_strategy(context, config, total_steps=total_steps),
        requires_metrics=weights.has_fillers,
        num_synchronized=num_synchronized,
    )


def _loss_weights(
    model: keras.Model, config: StepConfig, plan: SamplePlan, collectives: Collectives, quota: BadSampleQuota
) -> LossWeights:
    op = require_pipeline(leaves_of(model)[0]).reduce.config.op
    changes = config.balancing.balance or config.stragglers.is_active or quota.allows_any
    changes = changes or collectives.may_change or config.rescale
    return LossWeights(
        is_weighted=changes or not plan.is_even,
        has_fillers=changes or plan.has_fillers,
        leaves_out_samples=quota.allows_any,
        loss_sums=sums_over_batch(model, op, config.gradient_accumulation_steps),
    )


def _require_samples(model: keras.Model, element_spec: Any) -> None:
    """Raises UsageError for batches of a fixed size, which look like samples with one dimension more."""
    data, _ = element_spec
    x = tf.nest.flatten(keras.utils.unpack_x_y_sample_weight(data)[0])
    inputs = getattr(model, "inputs", None) or []
    shapes = [(spec.shape[1:], tf.TensorShape(each.shape[1:])) for spec, each in zip(x, inputs, strict=False)]
    if shapes and all(own.rank == wanted.rank + 1 and own[1:].is_compatible_with(wanted) for own, wanted in shapes):
        own, wanted = shapes[0]
        raise UsageError(
            f"samples must have the shapes of the model's inputs. Received: {own} for an input of {wanted}. Datasets "
            "that yield batches of a fixed size, as with batch(…, drop_remainder=True), are passed as "
            "hvdtrain.data.Stream(dataset, batched=True)."
        )
