"""Makes the steps of a run and nothing else: no logs, checkpoints or callbacks. For measurements."""

import time

import keras

from hvdtrain.data import Source
from hvdtrain.data.preprocessed import preprocessed
from hvdtrain.data.sample_plan import SamplePlan
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.optimizers import optimizers_of
from hvdtrain.fault_tolerance.job_watch import JobWatch
from hvdtrain.loggers.config import LoggingConfig
from hvdtrain.optim.distributed_optimizer import gradient_bytes
from hvdtrain.training.clock import Clock
from hvdtrain.training.config import StepConfig
from hvdtrain.training.gradient_record import make_record
from hvdtrain.training.parts import make_parts
from hvdtrain.training.plan import sample_plan
from hvdtrain.training.preparation import prepare_ranks
from hvdtrain.training.resolution import resolve

_UNLIMITED_STEPS = 10**9


class StepRunner:
    """Makes steps as a trainer does.

    Args:
        model: built and compiled; its optimizer is made distributed if it is not yet.
        source: the samples to train on, all of them on every rank.
        config: how a step is made.
        collectives: the ranks that train together.
        logging: what steps measure for logs (default: nothing).

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
    ):
        resolved = resolve(config, model, source, collectives)
        self.model = model
        self.source = source = preprocessed(source, model)
        self.config = resolved.config
        self.collectives = collectives
        self._job_watch = job_watch
        self.parts = make_parts(
            model,
            source,
            sample_plan(source, config, collectives),
            resolved,
            collectives=collectives,
            job_watch=job_watch,
            record=make_record(model, logging),
            total_steps=_UNLIMITED_STEPS,
        )

    @property
    def plan(self) -> SamplePlan:
        """The assignment of samples to steps and ranks."""
        return self.parts.feed.plan

    @property
    def step(self) -> int:
        """Number of steps made."""
        return self.parts.progress.step

    @property
    def bytes_per_step(self) -> int:
        """Bytes that this rank passes to the allreduce in each step of sync mode."""
        return sum(gradient_bytes(each, 1) for each in optimizers_of(self.model))

    def start(self) -> None:
        """Prepares a separate run, from the first sample. All ranks must call it."""
        parts = self.parts
        prepare_ranks(
            self.model,
            self.source,
            feed=parts.feed,
            quota=parts.quota,
            record=parts.record,
            requires_metrics=parts.requires_metrics,
            collectives=self.collectives,
        )
        parts.strategy.start()
        parts.feed.start(0)

    def run_steps(self, steps: int, clock: Clock) -> None:
        """Makes this many steps."""
        last = self.step + steps
        while (before := self.step) < last:
            self._job_watch.heartbeat("training", before)
            start_s = time.perf_counter()
            self.parts.strategy.run(last - before)
            clock.calls.append((max(1, self.step - before), time.perf_counter() - start_s))
