"""Feeds: iterators over a rank's training and evaluation batches that can skip unreadable samples."""

import dataclasses
import functools
from typing import Any

import tensorflow as tf

from hvdtrain.data.bad_samples import BadSampleQuota, ExcludedSamples
from hvdtrain.data.device_prefetch import prefetch_to
from hvdtrain.data.pipeline import evaluation_dataset, training_dataset
from hvdtrain.data.sample_plan import SamplePlan, shard_batches
from hvdtrain.data.source import Source
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.seams import tensorflow_internals


class TrainingFeed:
    """This rank's micro-batches, for an unlimited number of epochs.

    Args:
        device: the device to which batches are copied ahead of their steps; None: each step copies its own.
    """

    def __init__(self, source: Source, plan: SamplePlan, quota: BadSampleQuota, device: str | None = None):
        self._source = source
        self.plan = plan
        self._device = device
        self._excluded = ExcludedSamples(source, quota)
        self.iterator: Any = None

    @functools.cached_property
    def element_spec(self) -> Any:
        """The tf.TypeSpec of the iterator's elements."""
        return training_dataset(self._source, self.plan).element_spec

    def start(self, micro_batch: int) -> None:
        """Positions the iterator at a micro-batch of this rank, counted across epochs.

        The iterator stays the same object once it exists, so that a compiled step that reads it is not traced again.
        """
        dataset = self._prefetched(
            training_dataset(self._source, self.plan, first_micro_batch=micro_batch, excluded=self._excluded.numbers)
        )
        if self.iterator is None:
            self.iterator = iter(dataset)
        else:
            tf.raw_ops.MakeIterator(
                dataset=tf.data.experimental.to_variant(dataset),
                iterator=tensorflow_internals.ITERATOR_RESOURCE.of(self.iterator),
            )
        # Keeps the dataset's Python functions alive.
        self._dataset = dataset

    def _prefetched(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        return dataset if self._device is None else prefetch_to(self._device, dataset)

    def set_rank_batch_sizes(self, sizes: tuple[int, ...]) -> None:
        """Changes how the samples of a global batch are assigned to ranks, from the next :meth:`start` on."""
        self.plan = dataclasses.replace(self.plan, rank_batch_sizes=sizes)

    def resume_after(self, error: Exception, micro_batch: int) -> None:
        """Excludes the unreadable samples of a micro-batch and restarts the iterator there.

        Meanwhile, the other ranks wait in this step's allreduce.

        Raises:
            DataError: more samples are unreadable than allowed.
            Exception: ``error`` itself, if all samples of the micro-batch can be read.
        """
        self._excluded.exclude_bad(self.plan.numbers(micro_batch, self._excluded.numbers), error)
        self.start(micro_batch)


class EvaluationFeed:
    """This rank's share of the evaluation samples; the shares of all ranks cover each sample once.

    Args:
        ranks: the ranks that evaluate together; they may change before each :meth:`restart`.
    """

    def __init__(self, source: Source, batch_size: int, ranks: Collectives, quota: BadSampleQuota):
        self._source = source
        self._batch_size = batch_size
        self._ranks = ranks
        self._excluded = ExcludedSamples(source, quota)

    @property
    def num_batches(self) -> int:
        """The batches of this rank."""
        ranks, excluded = self._ranks, self._excluded.numbers
        return len(shard_batches(self._source.num_samples, self._batch_size, ranks.rank, ranks.size, excluded))

    def restart(self) -> None:
        """Starts at the first batch. Must be called before each evaluation."""
        self._position = 0
        self._make_iterator()

    def _make_iterator(self) -> None:
        self.iterator: Any = iter(
            evaluation_dataset(
                self._source,
                self._batch_size,
                self._ranks.rank,
                self._ranks.size,
                first_batch=self._position,
                excluded=self._excluded.numbers,
            )
        )

    def batch_done(self) -> None:
        """Records that a batch was evaluated."""
        self._position += 1

    def resume_after(self, error: Exception) -> None:
        """Like :meth:`TrainingFeed.resume_after`, for the current batch."""
        batches = shard_batches(
            self._source.num_samples, self._batch_size, self._ranks.rank, self._ranks.size, self._excluded.numbers
        )
        self._excluded.exclude_bad(batches[self._position], error)
        self._make_iterator()
