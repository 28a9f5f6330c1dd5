"""The batches that a rank trains and evaluates on, past samples that cannot be read."""

import functools
from typing import Any

from hvdtrain.data.bad_samples import BadSampleQuota
from hvdtrain.data.pipeline import evaluation_dataset, training_dataset
from hvdtrain.data.source import Source
from hvdtrain.sampling import SamplePlan, shard_batches


class TrainingFeed:
    """This rank's micro-batches, epoch after epoch without end."""

    def __init__(self, source: Source, plan: SamplePlan, quota: BadSampleQuota):
        self._source = source
        self._plan = plan
        self._quota = quota
        self._excluded: frozenset[int] = frozenset()
        self.iterator: Any = None

    @functools.cached_property
    def element_spec(self) -> Any:
        """The tf.TypeSpec of what the iterator gives."""
        return training_dataset(self._source, self._plan).element_spec

    def start(self, micro_batch: int) -> None:
        """Begins with this rank's micro-batch of that number, counted across epochs."""
        self.iterator = iter(
            training_dataset(self._source, self._plan, first_micro_batch=micro_batch, excluded=self._excluded)
        )

    def resume_after(self, error: Exception, micro_batch: int) -> None:
        """Leaves the unreadable samples of a micro-batch out, and goes on with it.

        The other ranks wait in the reduction of this step meanwhile.

        Raises:
            DataError: more samples are unreadable than allowed.
            Exception: the one given, where every sample of the micro-batch can be read.
        """
        bad = self._source.find_bad(self._plan.numbers(micro_batch, self._excluded))
        if not bad:
            raise error
        self._quota.note_found(bad)
        self._excluded |= {each.number for each in bad}
        self.start(micro_batch)


class EvaluationFeed:
    """This rank's share of the samples, each once over all ranks."""

    def __init__(self, source: Source, batch_size: int, rank: int, size: int, quota: BadSampleQuota):
        self._source = source
        self._batch_size = batch_size
        self._rank = rank
        self._size = size
        self._quota = quota
        self._excluded: frozenset[int] = frozenset()

    def restart(self) -> None:
        """Begins with the first batch; to be called before each evaluation."""
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
        """Tells that a batch was evaluated."""
        self._position += 1

    def resume_after(self, error: Exception) -> None:
        """As :meth:`TrainingFeed.resume_after`, for the batch that is due."""
        batches = shard_batches(self._source.num_samples, self._batch_size, self._rank, self._size, self._excluded)
        bad = self._source.find_bad(batches[self._position])
        if not bad:
            raise error
        self._quota.note_found(bad)
        self._excluded |= {each.number for each in bad}
        self._make_iterator()
