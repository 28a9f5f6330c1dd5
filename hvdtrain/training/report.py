"""What a trainer reports: log lines, histograms, and the summary at the end."""

from typing import Any

from hvdtrain.distributed import replica_consistency
from hvdtrain.distributed.optimizers import leaves_of
from hvdtrain.loggers.reporter import Reporter
from hvdtrain.optim.loss_scaling import overflowed_steps
from hvdtrain.training.activations import Activations
from hvdtrain.training.clock import Clock
from hvdtrain.training.metrics import reduced_results
from hvdtrain.training.step_runner import StepRunner


class TrainingReport:
    """Gathers a run's values over all ranks and passes them to the reporter; all ranks must call it."""

    def __init__(self, runner: StepRunner, reporter: Reporter, activations: Activations):
        self._runner = runner
        self._reporter = reporter
        self._activations = activations

    def epoch_so_far(self) -> dict[str, float]:
        """Loss and metrics of the epoch over all ranks, reduced once per step."""
        progress = self._runner.progress
        if progress.values_step != progress.step:
            progress.values = reduced_results(
                self._runner.model, self._runner.collectives, self._runner.train_step.returned
            )
            progress.values_step = progress.step
        return progress.values

    def log(self, clock: Clock) -> None:
        """Reports loss, metrics and speed."""
        runner = self._runner
        gauges = {
            "learning_rate": float(leaves_of(runner.model)[0].learning_rate),
            "gradient_norm": runner.monitor.norm(),
            **(clock.speed_since_last(runner.plan.global_batch_size) if clock.has_timed else {}),
        }
        self._reporter.progressed(runner.progress.step, {**self.epoch_so_far(), **gauges})

    def histograms(self) -> None:
        """Reports histograms of weights, gradients and activations."""
        groups = {
            "weights": {variable.path: variable.numpy() for variable in self._runner.model.trainable_variables},
            "gradients": self._runner.monitor.copies(),
            "activations": self._activations.read(),
        }
        self._reporter.histograms(self._runner.progress.step, groups)

    def summary(self, clock: Clock, resumed_from: int | None) -> dict[str, Any]:
        """A run's ``summary.json``, except for what only the command line knows."""
        runner, plan, progress = self._runner, self._runner.plan, self._runner.progress
        full_epochs, rest = divmod(progress.step, plan.steps_per_epoch)
        skipped = runner.monitor.skipped_steps() + overflowed_steps(runner.model.optimizer, progress.step)
        return {
            "mode": runner.strategy.mode,
            "ranks": plan.size,
            "hosts": runner.collectives.cross_size,
            "steps": progress.step,
            "epochs": progress.step / plan.steps_per_epoch,
            "samples": full_epochs * plan.samples_per_epoch + rest * plan.global_batch_size,
            "loss": progress.values.get("loss"),
            "metrics": {name: value for name, value in progress.values.items() if name != "loss"},
            "eval": progress.evaluated,
            "wall_seconds": clock.wall_seconds(),
            **self._speed(clock),
            "bytes_reduced": runner.strategy.bytes_reduced,
            "skipped_steps": runner.total(skipped),
            "bad_samples": runner.quota.total(),
            "compression_error": runner.monitor.compression_error(),
            **runner.strategy.summary(),
            "resumed_from": resumed_from,
            "weights_sha256": replica_consistency.weights_sha256(runner.model),
        }

    def _speed(self, clock: Clock) -> dict[str, Any]:
        runner = self._runner
        if not clock.has_timed:
            return {"examples_per_second": None, "step_ms": None, "communication_fraction": None}
        fractions = {"communication_fraction": None}
        if runner.strategy.in_lockstep:
            fractions = runner.shares.summary(1000 * clock.seconds_per_step())
        return {
            "examples_per_second": runner.plan.global_batch_size / clock.seconds_per_step(),
            "step_ms": clock.step_ms(),
            **fractions,
        }
