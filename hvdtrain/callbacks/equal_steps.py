"""Refuses different numbers of steps in ``model.fit``: a rank would wait forever for one that has ended."""

import keras

from hvdtrain.distributed.agreement import ranks_text
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.optimizers import leaves_of
from hvdtrain.errors import UsageError
from hvdtrain.optim.distributed_optimizer import reduction_checks
from hvdtrain.optim.reduction_checks import EpochSteps

_RULE = "all ranks must make the same number of steps per epoch."
_REMEDY = "Pass the data through hvdtrain.shard, or set steps_per_epoch to what every rank has."


class EqualSteps:
    """Compares the steps of all ranks: their number before training, if it is known, and each epoch's end.

    Raises:
        UsageError: on every rank, if numbers of steps are known and differ; or the optimizer is not distributed.
    """

    def __init__(self, model: keras.Model, steps_per_epoch: int | None, collectives: Collectives):
        self._model = model
        self._steps_per_epoch = steps_per_epoch
        self._collectives = collectives
        all_ranks = collectives.allgather(steps_per_epoch)
        if len(set(all_ranks) - {None}) > 1:
            fewest = min(each for each in all_ranks if each is not None)
            found = ", ".join(f"{each} on rank {rank}" for rank, each in enumerate(all_ranks))
            raise UsageError(
                f"{_RULE} Received: {found}. Rank {all_ranks.index(fewest)} would end its epoch after step {fewest}, "
                f"and the others would wait for it in the next. {_REMEDY}"
            )
        checks = reduction_checks(model.optimizer)
        before = checks.epoch_steps
        self._steps = checks.epoch_steps = before or EpochSteps(collectives)
        ends_together = None in all_ranks
        if before is None or before.ends_together != ends_together:
            self._steps.ends_together = ends_together
            model.make_train_function(force=True)

    def epoch_begins(self, epoch: int) -> None:
        self._epoch = epoch
        self._steps.begin()

    def epoch_ends(self) -> None:
        """After the last step of an epoch; all ranks must call it.

        Raises:
            UsageError: the data of a rank has ended before that of others.
        """
        made = self._steps.made
        ended = self._steps.end()
        if len(ended) < self._collectives.size:
            names = ranks_text(ended, [""] * self._collectives.size)
            raise self._error(f"{names} ended epoch {self._epoch + 1} after {made} steps")
        if self._steps_per_epoch is None or self._model.stop_training:
            return
        expected = self._steps_per_epoch // (leaves_of(self._model)[0].gradient_accumulation_steps or 1)
        if made < expected:
            # Raised on this rank only: the others are in a step that it will not make, and end with the job.
            rank = self._collectives.rank
            raise self._error(f"rank {rank} ended epoch {self._epoch + 1} after {made} of {expected} steps")

    def _error(self, found: str) -> UsageError:
        return UsageError(f"{_RULE} Received: {found}, and other ranks have more data. {_REMEDY}")
