"""Everything that makes training steps: sample plan, feed, compiled step and strategy; no logs, no checkpoints."""

import time
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.config import exclusions
from hvdtrain.config.exclusions import Fact
from hvdtrain.config.fields import facts_of, with_options
from hvdtrain.config.wording import option
from hvdtrain.data import Source, Stream
from hvdtrain.data.bad_samples import BadSampleQuota
from hvdtrain.data.feeds import TrainingFeed
from hvdtrain.data.sample_plan import SamplePlan, split_batch
from hvdtrain.distributed import replica_consistency
from hvdtrain.distributed.agreement import require_agreement
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.optimizers import build_optimizer, leaves_of, optimizers_of, require_keras_model
from hvdtrain.errors import UsageError
from hvdtrain.fault_tolerance.job_watch import JobWatch
from hvdtrain.loggers.config import LoggingConfig
from hvdtrain.optim.distributed_optimizer import (
    compression_memories,
    gradient_bytes,
    require_distributed,
)
from hvdtrain.optim.keras_calls import synchronize_batch_normalization
from hvdtrain.optim.pipeline import require_pipeline
from hvdtrain.seams import keras_internals
from hvdtrain.system import devices, network
from hvdtrain.training.clock import Clock
from hvdtrain.training.config import StepConfig, TrainConfig
from hvdtrain.training.eval_step import build_metrics
from hvdtrain.training.gradient_record import GradientRecord
from hvdtrain.training.load_balancing import LoadBalancer
from hvdtrain.training.losses import sums_over_batch
from hvdtrain.training.progress import Progress
from hvdtrain.training.quorum.feed import QuorumFeed
from hvdtrain.training.step_snapshot import StepSnapshot
from hvdtrain.training.step_times import EXCHANGE_EVERY, StepTimes, TimeShares
from hvdtrain.training.strategies.factory import make_strategy
from hvdtrain.training.strategies.strategy import StrategyContext
from hvdtrain.training.tracing import build_by_tracing, trace_train_step
from hvdtrain.training.train_step import LossWeights, TrainStep
from hvdtrain.training.xla import is_chosen

_UNLIMITED_STEPS = 10**9


class StepRunner:
    """Makes the steps of a run, for the trainer and for measurements.

    Args:
        model: built and compiled; its optimizer is made distributed if it is not yet.
        source: the samples to train on, all of them on every rank.
        config: how a step is made.
        logging: what is measured in the steps for logs (default: nothing).
        collectives: the ranks that train together.
        total_steps: of the run (default: unlimited).

    Raises:
        UsageError: model, data and configuration do not fit together.
    """

    def __init__(
        self,
        model: keras.Model,
        source: Source,
        config: StepConfig,
        *,
        collectives: Collectives,
        job_watch: JobWatch,
        logging: LoggingConfig | None = None,
        total_steps: int | None = None,
    ):
        require_keras_model(model)
        if not optimizers_of(model):
            raise UsageError(f"model {model.name!r} must be compiled with an optimizer. Received: a model without one.")
        jit_compile_is_optional = config.jit_compile is None
        facts = {**facts_of(config), **_conditions(model, source, config, collectives)}
        exclusions.require_compatible(facts)
        config = with_options(config, {"jit_compile": is_chosen(model, config, facts)})
        self.model = model
        self.source = source
        self.config = config
        self.collectives = collectives
        self.job_watch = job_watch
        self.progress = Progress()
        plan = sample_plan(source, config, collectives)
        self.quota = BadSampleQuota(config.guards.bad_samples, collectives)
        device = devices.own_gpu() if config.prefetch_to_device else None
        self.feed = (QuorumFeed if config.stragglers.is_active else TrainingFeed)(source, plan, self.quota, device)
        self.times = StepTimes(config.gradient_accumulation_steps)
        self.time_shares = TimeShares(self.times, collectives, network.host_name())
        self.balancer = LoadBalancer(
            config.balancing, self.feed, self.time_shares, ranks_may_change=collectives.may_change
        )
        _require_samples(model, self.feed.element_spec)
        build_by_tracing(model, self.feed.element_spec)
        accumulation = config.gradient_accumulation_steps
        for optimizer in optimizers_of(model):
            require_distributed(optimizer, accumulation, collectives)
        reduction = require_pipeline(leaves_of(model)[0]).reduce
        op = reduction.config.op
        facts |= facts_of(config) | facts_of(reduction.config)
        if reduction.compression is not None:
            facts[exclusions.COMPRESSION] = option("compression", reduction.compression)
        if not sums_over_batch(model, op, accumulation):
            facts |= exclusions.facts_from(exclusions.MEAN_LOSS)
        exclusions.require_compatible(facts)
        changes = config.balancing.balance or config.stragglers.is_active or config.guards.bad_samples > 0
        changes = changes or collectives.may_change or config.rescale
        weights = LossWeights(
            is_weighted=changes or not self.plan.is_even,
            has_fillers=changes or self.plan.has_fillers,
            loss_sums=sums_over_batch(model, op, accumulation),
        )
        logging = logging or LoggingConfig(log_every=_UNLIMITED_STEPS)
        self.record = GradientRecord(
            len(leaves_of(model)), copy_every=logging.histograms_every, compression_error_every=logging.log_every
        )
        self.train_step = TrainStep(
            model,
            self.feed,
            config,
            times=self.times,
            record=self.record,
            weights=weights,
            jit_compile_is_optional=jit_compile_is_optional,
        )
        self._has_fillers = weights.has_fillers
        self.num_synchronized = synchronize_batch_normalization(
            model,
            all_layers=config.sync_batchnorm,
            collectives=collectives,
            sample_weight=self.train_step.sample_weight,
        )
        self.strategy = make_strategy(
            StrategyContext(
                model=model,
                plan=lambda: self.plan,
                progress=self.progress,
                feed=self.feed,
                train_step=self.train_step,
                collectives=collectives,
                job_watch=job_watch,
            ),
            config,
            total_steps=total_steps or _UNLIMITED_STEPS,
        )

    @property
    def plan(self) -> SamplePlan:
        """The assignment of samples to steps and ranks."""
        return self.feed.plan

    def prepare(self) -> None:
        """Compares data and models, makes replicas equal and builds what steps need; all ranks must call it.

        Raises:
            JobError: on every rank: more samples are unreadable than allowed.
            DisagreementError: ranks differ in data or model.
        """
        model, collectives = self.model, self.collectives
        require_agreement("training data", self.source.facts(), collectives)
        self.quota.note_known(self.source.bad_samples)
        build_optimizer(model)
        self.record.build(model.trainable_variables)
        require_agreement("model", replica_consistency.structure(model), collectives)
        replica_consistency.broadcast(model, collectives=collectives)
        self.build_metrics(required=self._has_fillers)

    def keep_snapshot(self) -> None:
        """From now on, a step that is interrupted can be undone; call it when the metrics are built."""
        if compression_memories(self.model):  # created in the first step
            trace_train_step(self.model, self.feed.element_spec)
        self.train_step.snapshot = StepSnapshot(self.model, self.times)

    def undo_interrupted_step(self) -> None:
        """Restores what an interrupted step has changed, so that it can be repeated."""
        if self.train_step.snapshot is not None:
            self.train_step.snapshot.undo(self.train_step.steps_made + 1)

    def restart_with(self, plan: SamplePlan) -> None:
        """Continues after the steps made so far, with another assignment of samples to ranks."""
        self.feed.plan = plan
        self.feed.start(self.train_step.steps_made * self.config.gradient_accumulation_steps)
        self.time_shares.restart()
        self.balancer.restart(self.collectives.rank)

    def build_metrics(self, *, required: bool) -> None:
        """Creates the variables of the model's metrics.

        Args:
            required: False: leave it to the first step if Keras cannot derive them from model and data.
        """
        try:
            build_metrics(self.model, self.feed.element_spec)
        except Exception:
            # A user's own train_step need not call the model as Keras would.
            if required:
                trace_train_step(self.model, self.feed.element_spec)

    @property
    def bytes_per_step(self) -> int:
        """Bytes that this rank passes to the allreduce in each step of sync mode."""
        return sum(gradient_bytes(each, 1) for each in optimizers_of(self.model))

    @property
    def updates(self) -> int:
        """How often the weights were updated: with --quorum, more than once in some steps."""
        return self.train_step.steps_made if self.config.stragglers.is_active else self.progress.step

    def total(self, own: int) -> int:
        """A count of the run from this rank's: the sum over independent ranks; otherwise it is the same on every rank.

        All ranks must call it.
        """
        return sum(self.collectives.allgather(own)) if self.strategy.ranks_are_independent else own

    @property
    def exchange_every(self) -> int:
        """Steps between two calls of :meth:`exchange_times`; 0: never."""
        if not self.strategy.in_lockstep:
            return 0
        return self.config.balancing.balance_every if self.config.balancing.balance else EXCHANGE_EVERY

    def exchange_times(self) -> None:
        """Gathers the step times of all ranks, and assigns samples to ranks accordingly; all ranks must call it."""
        self.time_shares.exchange()
        self.balancer.update(self.times.micro_batches)

    def start(self) -> None:
        """Prepares a run of its own, from the first sample; for measurements. All ranks must call it."""
        self.prepare()
        self.strategy.start()
        self.feed.start(0)

    def run_steps(self, steps: int, clock: Clock) -> None:
        """Makes this many steps and nothing else; for measurements."""
        last = self.progress.step + steps
        while (before := self.progress.step) < last:
            self.job_watch.heartbeat("training", before)
            start_s = time.perf_counter()
            self.strategy.run(last - before)
            clock.calls.append((max(1, self.progress.step - before), time.perf_counter() - start_s))


def _conditions(model: keras.Model, source: Source, config: StepConfig, collectives: Collectives) -> dict[Fact, str]:
    """What is known of a run besides its options."""
    layers = keras_internals.FLATTEN_LAYERS.of(model)(include_self=False)
    synchronizes = any(isinstance(each, keras.layers.BatchNormalization) and each.synchronized for each in layers)
    found = exclusions.facts_from(
        *([exclusions.ELASTIC] if collectives.may_change else []),
        *([exclusions.STREAM] if isinstance(source, Stream) else []),
        *([exclusions.EAGER_MODEL] if model.run_eagerly else []),
        *([exclusions.SEVERAL_OPTIMIZERS] if len(leaves_of(model)) > 1 else []),
        *([exclusions.SYNCHRONIZED_LAYERS] if synchronizes and not config.sync_batchnorm else []),
    )
    if devices.is_deterministic():
        found[exclusions.DETERMINISTIC] = str(exclusions.DETERMINISTIC)
    return found


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
