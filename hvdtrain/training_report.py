"""What a trainer tells of a run: a line now and then, and the summary in the end."""

from typing import Any

import keras

from hvdtrain import replicas
from hvdtrain.activations import Activations
from hvdtrain.averaging import ParameterAverager
from hvdtrain.collectives import Collectives
from hvdtrain.data.bad_samples import BadSampleQuota
from hvdtrain.gradient_watch import GradientWatch, described
from hvdtrain.loss_scale import overflowed_steps, require_usable_loss_scale
from hvdtrain.metrics import reduced_results
from hvdtrain.optimizer import gradient_bytes, leaves
from hvdtrain.progress import Progress
from hvdtrain.report import Reporter
from hvdtrain.sampling import SamplePlan
from hvdtrain.timing.clock import Clock
from hvdtrain.timing.step_times import TimeShares


class TrainingReport:
    """Gathers a run's figures over all ranks and hands them to the reporter; every rank has to call it."""

    def __init__(
        self,
        model: keras.Model,
        plan: SamplePlan,
        progress: Progress,
        *,
        collectives: Collectives,
        reporter: Reporter,
        gradients: GradientWatch,
        quota: BadSampleQuota,
        shares: TimeShares | None,
        averager: ParameterAverager | None,
        activations: Activations,
    ):
        self._model = model
        self._plan = plan
        self._progress = progress
        self._collectives = collectives
        self._reporter = reporter
        self._gradients = gradients
        self._quota = quota
        self._shares = shares
        self._averager = averager
        self._activations = activations

    def epoch_so_far(self) -> dict[str, float]:
        """Loss and metrics of the epoch over all ranks, added up once a step."""
        progress = self._progress
        if progress.values_step != progress.step:
            progress.values = reduced_results(self._model, self._collectives)
            progress.values_step = progress.step
        return progress.values

    def log(self, clock: Clock) -> None:
        """Tells how the run goes.

        Raises:
            DataError: more samples are unreadable than allowed.
            NonFiniteError: no loss scale is small enough.
        """
        self._quota.total()
        self._look_for_skipped()
        gauges = {
            "learning_rate": float(leaves(self._model.optimizer)[0].learning_rate),
            "gradient_norm": self._gradients.norm(),
            **(clock.speed_since_last(self._plan.global_batch_size) if clock.has_timed else {}),
        }
        self._reporter.progressed(self._progress.step, {**self.epoch_so_far(), **gauges})

    def histograms(self) -> None:
        """Tells of weights, gradients and activations."""
        groups = {
            "weights": replicas.weights_by_path(self._model),
            "gradients": self._gradients.copies(),
            "activations": self._activations.read(),
        }
        self._reporter.histograms(self._progress.step, groups)

    def _look_for_skipped(self) -> None:
        skipped, progress = self._gradients.skipped_steps(), self._progress
        if self._averager is not None and self._gradients.applies is not None:
            # Each rank skips for itself, and all have to come to the same question.
            skipped = sum(self._collectives.allgather(skipped))
        if skipped > progress.skipped_steps_told:
            progress.skipped_steps_told = skipped
            culprits = described(self._gradients.culprits(self._collectives))
            where = "on every rank" if self._averager is None else "over all ranks"
            self._reporter.warned(progress.step, f"{skipped} step(s) skipped so far {where}; the last: {culprits}")
        rank = None if self._averager is None else self._collectives.rank
        require_usable_loss_scale(self._model.optimizer, progress.step, rank=rank)

    def summary(self, clock: Clock, resumed_from: int | None) -> dict[str, Any]:
        """What a run's ``summary.json`` holds, but for what only the command line knows."""
        plan, progress = self._plan, self._progress
        full_epochs, rest = divmod(progress.step, plan.steps_per_epoch)
        return {
            "mode": "sync" if self._averager is None else "local",
            "ranks": plan.size,
            "hosts": self._collectives.cross_size,
            "steps": progress.step,
            "epochs": progress.step / plan.steps_per_epoch,
            "samples": full_epochs * plan.samples_per_epoch + rest * plan.global_batch_size,
            "loss": progress.values.get("loss"),
            "metrics": {name: value for name, value in progress.values.items() if name != "loss"},
            "eval": progress.evaluated,
            "wall_seconds": clock.wall_seconds(),
            **self._speed(clock),
            "bytes_reduced": self._bytes_reduced(),
            "skipped_steps": self._gradients.skipped_steps() + overflowed_steps(self._model.optimizer, progress.step),
            "bad_samples": self._quota.total(),
            "compression_error": self._gradients.compression_error(),
            "averaging_rounds": 0,
            **({} if self._averager is None else self._averager.summary()),
            "resumed_from": resumed_from,
            "weights_sha256": replicas.weights_sha256(self._model),
        }

    def _bytes_reduced(self) -> int:
        averaged = 0 if self._averager is None else self._averager.bytes_reduced
        return averaged + self._progress.reduced_steps * gradient_bytes(self._model.optimizer)

    def _speed(self, clock: Clock) -> dict[str, Any]:
        if not clock.has_timed:
            return {"examples_per_second": None, "step_ms": None, "communication_fraction": None}
        shares = {"communication_fraction": None}
        if self._shares is not None:
            shares = self._shares.summary(1000 * clock.seconds_per_step())
        return {
            "examples_per_second": self._plan.global_batch_size / clock.seconds_per_step(),
            "step_ms": clock.step_ms(),
            **shares,
        }
