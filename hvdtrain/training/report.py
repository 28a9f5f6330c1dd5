"""What a trainer reports: log lines, histograms, and the summary at the end."""

from typing import Any, NamedTuple

import keras

from hvdtrain.config.fields import default_of
from hvdtrain.data.bad_samples import BadSampleQuota
from hvdtrain.data.feeds import TrainingFeed
from hvdtrain.distributed import replica_consistency
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.optimizers import leaves_of
from hvdtrain.loggers.config import LoggingConfig
from hvdtrain.loggers.progress_bar import console_reporter
from hvdtrain.loggers.reporter import CompositeReporter, Reporter, RunShape
from hvdtrain.optim.loss_scaling import loss_scale, overflowed_steps
from hvdtrain.optim.pipeline import require_pipeline
from hvdtrain.system.gpu_usage import gpu_gauges
from hvdtrain.system.terminal import stdout_is_terminal
from hvdtrain.training.activations import Activations
from hvdtrain.training.clock import Clock
from hvdtrain.training.config import StepConfig
from hvdtrain.training.gradient_record import GradientRecord
from hvdtrain.training.load_balancing import LoadBalancer
from hvdtrain.training.metrics import ResultsInBackground, reduced_results, single_numbers
from hvdtrain.training.progress import Progress
from hvdtrain.training.returned_results import ReturnedResults
from hvdtrain.training.step_times import TimeShares
from hvdtrain.training.stragglers import possible_remedies
from hvdtrain.training.strategies.strategy import Strategy


class PendingLine(NamedTuple):
    """A log line, without the results that are being reduced."""

    step: int
    results: ResultsInBackground
    gauges: dict[str, float]


class TrainingReport:
    """Gathers a run's values over all ranks and passes them to the reporter; all ranks must call it."""

    def __init__(
        self,
        model: keras.Model,
        config: StepConfig,
        *,
        feed: TrainingFeed,
        progress: Progress,
        quota: BadSampleQuota,
        record: GradientRecord,
        returned: ReturnedResults,
        time_shares: TimeShares,
        balancer: LoadBalancer,
        strategy: Strategy,
        activations: Activations,
        collectives: Collectives,
        reporter: Reporter,
    ):
        self._model = model
        self._config = config
        self._feed = feed
        self._progress = progress
        self._quota = quota
        self._record = record
        self._returned = returned
        self._time_shares = time_shares
        self._balancer = balancer
        self._strategy = strategy
        self._activations = activations
        self._collectives = collectives
        self._reporter = reporter
        self._pending: PendingLine | None = None

    def shape(self, total_steps: int) -> RunShape:
        """The length of a run of ``total_steps`` steps, which this process begins or resumes at the current step."""
        plan = self._feed.plan
        return RunShape(
            total_steps,
            plan.steps_per_epoch,
            self._progress.step,
            plan.global_batch_size,
            plan.samples_per_epoch,
            plan.first_step,
            plan.first_sample,
        )

    def facts(self) -> dict[str, str]:
        """The first lines of a run's log."""
        model, plan = self._model, self._feed.plan
        size = f", {model.count_params():,} parameters" if model.built else ""
        return {
            "model": f"{model.name}{size}, on {plan.size} rank(s)",
            "global batch": f"{plan.global_batch_size} samples, {plan.steps_per_epoch} steps per epoch",
        }

    def epoch_so_far(self) -> dict[str, Any]:
        """Loss and metrics of the epoch over all ranks, reduced once per step."""
        progress = self._progress
        if progress.values_step != progress.step:
            progress.values = reduced_results(self._model, self._collectives, self._returned)
            progress.values_step = progress.step
        return progress.values

    def log(self, clock: Clock) -> None:
        """Logs loss, metrics and speed; if no rank waits for others, when :meth:`log_pending` finds them complete."""
        gauges = {
            "learning_rate": float(leaves_of(self._model)[0].learning_rate),
            "gradient_norm": self._record.norm(),
            **self._balancer.gauges(),
            **self._strategy.gauges(),
            **self._lost(),
            **gpu_gauges(),
            **(clock.speed_since_last(self._feed.plan.global_batch_size) if clock.has_timed else {}),
        }
        if self._strategy.waits_for_ranks:
            self._reporter.progressed(self._progress.step, {**single_numbers(self.epoch_so_far()), **gauges})
            return
        self.log_pending(waits=True)
        results = ResultsInBackground(self._model, self._collectives, self._returned)
        self._pending = PendingLine(self._progress.step, results, gauges)

    def log_pending(self, *, waits: bool = False) -> None:
        """Logs the line that is pending if its results are complete.

        Args:
            waits: wait for them.
        """
        line = self._pending
        if line is None or not (waits or line.results.is_done):
            return
        self._pending, progress, results = None, self._progress, line.results.results()
        if line.step >= progress.values_step:
            progress.values, progress.values_step = results, line.step
        self._reporter.progressed(line.step, {**single_numbers(results), **line.gauges})

    def settle(self) -> None:
        """Logs the line that is pending, or drops it if a rank was lost.

        Call it when the collectives have been cut, or are idle.
        """
        if self._pending is not None and self._pending.results.has_failed:
            self._pending = None
        self.log_pending(waits=True)

    def _lost(self) -> dict[str, float]:
        """What steps lost, as far as this rank knows: only what there is."""
        found = {
            "loss_scale": loss_scale(self._model.optimizer),
            "skipped_steps": self._skipped_steps(),
            "bad_samples": self._quota.num_known,
            "compression_error": self._record.compression_error(),
        }
        return {name: value for name, value in found.items() if value}

    def _skipped_steps(self) -> int:
        return self._record.skipped_steps() + overflowed_steps(self._model.optimizer, self._strategy.updates)

    def rank_times(self) -> None:
        """Reports the step times of all ranks that were exchanged last."""
        seconds = self._time_shares.all_steps[-1]
        self._reporter.rank_times(self._progress.step, seconds, self._balancer.rank_batch_sizes)

    def histograms(self) -> None:
        """Reports histograms of weights, gradients and activations."""
        groups = {
            "weights": {variable.path: variable.numpy() for variable in self._model.trainable_variables},
            "gradients": self._record.copies(),
            "activations": self._activations.read(),
        }
        self._reporter.histograms(self._progress.step, groups)

    def summary(self, clock: Clock, resumed_from: int | None) -> dict[str, Any]:
        """A run's ``summary.json``, except for what only the command line knows."""
        plan, progress, strategy = self._feed.plan, self._progress, self._strategy
        shape = self.shape(progress.step)
        return {
            "mode": strategy.mode,
            "ranks": plan.size,
            "hosts": self._collectives.cross_size,
            "steps": progress.step,
            "epochs": shape.epochs(progress.step),
            "samples": shape.samples(progress.step),
            "loss": progress.values.get("loss"),
            "metrics": {name: value for name, value in single_numbers(progress.values).items() if name != "loss"},
            "eval": single_numbers(progress.evaluated),
            "wall_seconds": clock.wall_seconds(),
            **self._speed(clock),
            "bytes_reduced": strategy.bytes_reduced,
            "skipped_steps": strategy.total(self._skipped_steps()),
            "bad_samples": self._quota.total(),
            "compression_error": self._record.compression_error(),
            **strategy.summary(),
            **self._balancer.summary(),
            "resumed_from": resumed_from,
            "weights_sha256": replica_consistency.weights_sha256(self._model, self._collectives),
        }

    def _speed(self, clock: Clock) -> dict[str, Any]:
        # First, because all ranks take part, even one that joined after the last step and has made none.
        fractions = self._shares_of_a_step(clock) if self._strategy.in_lockstep else {"communication_fraction": None}
        if not clock.has_timed:
            return {"examples_per_second": None, "step_ms": None, "communication_fraction": None}
        return {
            "examples_per_second": self._feed.plan.global_batch_size / clock.seconds_per_step(),
            "step_ms": clock.step_ms(),
            **fractions,
        }

    def _shares_of_a_step(self, clock: Clock) -> dict[str, Any]:
        reduction = require_pipeline(leaves_of(self._model)[0]).reduce.config
        remedies = possible_remedies(self._config, reduction, self._collectives.conditions)
        step_ms = 1000 * clock.seconds_per_step() if clock.has_timed else 0.0
        found = self._time_shares.summary(step_ms, remedies)
        self.rank_times()
        return found


def console_of_rank(rank: int, config: LoggingConfig) -> Reporter:
    """What a trainer prints by default: on rank 0, its progress."""
    if rank != 0:
        return Reporter()
    is_set = config.log_every != default_of(LoggingConfig, "log_every")
    # A console that is no longer read does not end the training.
    return CompositeReporter([console_reporter(stdout_is_terminal(), prints_every_line=is_set)])
