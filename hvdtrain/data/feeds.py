"""Feeds: iterators over a rank's training and evaluation batches that can skip unreadable samples."""

import functools
from typing import Any

from hvdtrain.data.bad_samples import BadSampleQuota
from hvdtrain.data.pipeline import evaluation_dataset, training_dataset
from hvdtrain.data.sample_plan import SamplePlan, shard_batches
from hvdtrain.data.source import Source


class TrainingFeed:
    """This rank's micro-batches, for an unlimited number of epochs."""

    def __init__(self, source: Source, plan: SamplePlan, quota: BadSampleQuota):
        self._source = source
        self._plan = plan
        self._quota = quota
        self._excluded: frozenset[int] = frozenset()
        self.iterator: Any = None

    @functools.cached_property
    def element_spec(self) -> Any:
        """The tf.TypeSpec of the iterator's elements."""
        return training_dataset(self._source, self._plan).element_spec

    def start(self, micro_batch: int) -> None:
        """Makes the iterator, starting at this rank's given micro-batch, counted across epochs."""
        self.iterator = iter(
            training_dataset(self._source, self._plan, first_micro_batch=micro_batch, excluded=self._excluded)
        )

    def resume_after(self, error: Exception, micro_batch: int) -> None:
        """Excludes the unreadable samples of a micro-batch and restarts the iterator there.

        Meanwhile, the other ranks wait in this step's allreduce.

        Raises:
            DataError: more samples are unreadable than allowed.
            Exception: ``error`` itself, if all samples of the micro-batch can be read.
        """
        bad = self._source.find_bad(self._plan.numbers(micro_batch, self._excluded))
        if not bad:
            raise error
        self._quota.note_found(bad)
        self._excluded |= {each.number for each in bad}
        self.start(micro_batch)


class EvaluationFeed:
    """This rank's share of the evaluation samples; the shares of all ranks cover each sample once."""

    def __init__(self, source: Source, batch_size: int, rank: int, size: int, quota: BadSampleQuota):
        self._source = source
        self._batch_size = batch_size
        self._rank = rank
        self._size = size
        self._quota = quota
        self._excluded: frozenset[int] = frozenset()

    def restart(self) -> None:
        """Starts at the first batch. Must be called before each evaluation."""
        self._position = 0
        self._make_iterator()

    def _make_iterator(self) -> None:
        self.iterator: Any = iter(
            evaluation_dataset(
                self._source,
                self._batch_size,
                self._rank,
                self._size,
                first_batch=self._position,
                excluded=self._excluded,
            )
        )

    def batch_done(self) -> None:
        """Records that a batch was evaluated."""
        self._position += 1

    def resume_after(self, error: Exception) -> None:
        """Like :meth:`TrainingFeed.resume_after`, for the current batch."""
        batches = shard_batches(self._source.num_samples, self._batch_size, self._rank, self._size, self._excluded)
        bad = self._source.find_bad(batches[self._position])
        if not bad:
            raise error
        self._quota.note_found(bad)
        self._excluded |= {each.number for each in bad}
        self._make_iterator()
