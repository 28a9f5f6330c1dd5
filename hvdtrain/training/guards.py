"""Guards: what protects a run from skipped steps, a useless loss scale and too many unreadable samples."""

from hvdtrain.loggers.reporter import Reporter
from hvdtrain.optim.loss_scaling import require_usable_loss_scale
from hvdtrain.training.gradient_record import culprits_text
from hvdtrain.training.step_runner import StepRunner


class Guards:
    """Checks a run every ``guard_every`` steps, whether or not it logs; all ranks must call it."""

    def __init__(self, runner: StepRunner, reporter: Reporter):
        self._runner = runner
        self._reporter = reporter

    def check(self) -> None:
        """Reports skipped steps, and what the strategy warns of.

        Raises:
            JobError: on every rank: more samples are unreadable than allowed.
            NonFiniteError: no loss scale is small enough.
        """
        runner = self._runner
        runner.quota.total()
        self._report_skipped_steps()
        for text in runner.strategy.warnings():
            self._reporter.warned(runner.progress.step, text)
        rank = runner.collectives.rank if runner.strategy.ranks_are_independent else None
        require_usable_loss_scale(runner.model.optimizer, runner.progress.step, rank=rank)

    def _report_skipped_steps(self) -> None:
        runner, progress = self._runner, self._runner.progress
        skipped, independent = runner.record.skipped_steps(), runner.strategy.ranks_are_independent
        if runner.config.guards.on_nan == "skip":
            # Independent ranks skip steps of their own, and all ranks must take the same branch below.
            skipped = runner.total(skipped)
        if skipped > progress.reported_skipped_steps:
            progress.reported_skipped_steps = skipped
            culprits = culprits_text(runner.record.culprits(runner.collectives))
            where = "over all ranks" if independent else "on every rank"
            self._reporter.warned(progress.step, f"{skipped} step(s) skipped so far {where}; the last: {culprits}")
