"""This rank's micro-batches in the order of its shares; one that was too late for an update is kept for the next."""

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.data.feeds import TrainingFeed
from hvdtrain.data.pipeline import training_dataset
from hvdtrain.data.sample_plan import SamplePlan
from hvdtrain.training.quorum.shares import EpochShares, MicroBatch

_Key = tuple[int, int, int]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _DealtPlan(SamplePlan):
    """One rank's micro-batches in an epoch whose rest was redistributed."""

    positions: np.ndarray
    starts: np.ndarray
    counts: np.ndarray

    @property
    def computes_order(self) -> bool:
        return False

    def order(self, epoch: int) -> np.ndarray:
        return super().order(epoch)[self.positions]

    @property
    def steps_per_epoch(self) -> int:
        return len(self.starts)

    def epoch_slices(self, first: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.starts, self.counts, np.ones(len(self.starts))


class QuorumFeed(TrainingFeed):
    """Reads the micro-batches of :class:`~hvdtrain.training.quorum.shares.EpochShares`."""

    _next: _Key | None = None
    """What the iterator yields next."""
    _kept: tuple[_Key, Any] | None = None
    """The last micro-batch, until another one is requested."""

    def start(self, micro_batch: int) -> None:
        """Does nothing: reading starts at the first micro-batch that is requested."""

    def batch(self, shares: EpochShares, micro_batch: MicroBatch) -> Any:
        """The data of this rank's next micro-batch, as ``train_step`` takes it.

        Raises:
            DataError: a sample cannot be read.
        """
        key = (micro_batch.epoch, micro_batch.deal, micro_batch.index)
        if self._kept is None or self._kept[0] != key:
            self._kept = None
            if self._next != key:
                self._start_at(shares, micro_batch)
            try:
                data, _ = next(self.iterator)
            except tf.errors.OpError as error:
                positions = shares.positions_of(self.plan.rank, micro_batch.index)
                self._excluded.exclude_bad(self.plan.order(micro_batch.epoch)[positions], error)
                raise AssertionError("the quota of unreadable samples must be 0") from error
            self._kept = (key, data)
            self._next = self._key_after(shares, micro_batch)
        return self._kept[1]

    def _start_at(self, shares: EpochShares, micro_batch: MicroBatch) -> None:
        if shares.positions is None:
            self._read(self.plan, micro_batch.epoch * self.plan.steps_per_epoch + micro_batch.index)
            return
        starts, counts = shares.starts_and_counts(self.plan.rank)
        options = {field.name: getattr(self.plan, field.name) for field in dataclasses.fields(SamplePlan)}
        dealt = _DealtPlan(**options, positions=shares.positions, starts=starts, counts=counts)
        self._read(dealt, micro_batch.epoch * len(starts) + micro_batch.index)

    def _read(self, plan: SamplePlan, first_micro_batch: int) -> None:
        # Keeps the dataset's Python functions alive.
        self._batches = self._to_device(training_dataset(self._source, plan, first_micro_batch=first_micro_batch))
        self.iterator = iter(self._batches)

    def _key_after(self, shares: EpochShares, micro_batch: MicroBatch) -> _Key | None:
        """What the iterator yields after a micro-batch; None if it is no longer needed."""
        epoch, index = micro_batch.epoch, micro_batch.index + 1
        if shares.positions is None and index == self.plan.steps_per_epoch:
            return (epoch + 1, 0, 0)
        return (epoch, micro_batch.deal, index)
