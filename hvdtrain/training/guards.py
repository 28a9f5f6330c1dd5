"""Guards: what protects a run from skipped steps, a useless loss scale and too many unreadable samples."""

import keras

from hvdtrain.data.bad_samples import BadSampleQuota
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.loggers.reporter import Reporter
from hvdtrain.optim.loss_scaling import require_usable_loss_scale
from hvdtrain.training.gradient_record import GradientRecord, culprits_text
from hvdtrain.training.progress import Progress
from hvdtrain.training.strategies.strategy import Strategy


class Guards:
    """Checks a run every ``guard_every`` steps, whether or not it logs; all ranks must call it.

    Args:
        skips_steps: whether a step is skipped whose gradients are not finite.
    """

    def __init__(
        self,
        model: keras.Model,
        *,
        skips_steps: bool,
        progress: Progress,
        quota: BadSampleQuota,
        record: GradientRecord,
        strategy: Strategy,
        collectives: Collectives,
        reporter: Reporter,
    ):
        self._model = model
        self._skips_steps = skips_steps
        self._progress = progress
        self._quota = quota
        self._record = record
        self._strategy = strategy
        self._collectives = collectives
        self._reporter = reporter

    def check(self) -> None:
        """Reports skipped steps, and what the strategy warns of.

        Raises:
            JobError: on every rank: more samples are unreadable than allowed.
            NonFiniteError: no loss scale is small enough.
        """
        self._quota.total()
        self._report_skipped_steps()
        step = self._progress.step
        for text in self._strategy.warnings():
            self._reporter.warned(step, text)
        rank = self._collectives.rank if self._strategy.ranks_are_independent else None
        require_usable_loss_scale(self._model.optimizer, step, rank=rank)

    def _report_skipped_steps(self) -> None:
        progress, skipped = self._progress, self._record.skipped_steps()
        if self._skips_steps:
            # Independent ranks skip different steps, and all ranks must take the same branch below.
            skipped = self._strategy.total(skipped)
        if skipped > progress.reported_skipped_steps:
            progress.reported_skipped_steps = skipped
            culprits = culprits_text(self._record.culprits(self._collectives))
            where = "over all ranks" if self._strategy.ranks_are_independent else "on every rank"
            self._reporter.warned(progress.step, f"{skipped} step(s) skipped so far {where}; the last: {culprits}")
