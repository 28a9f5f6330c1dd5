"""Feeds: iterators over a rank's training and evaluation batches that can skip unreadable samples."""

import dataclasses
import functools
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.data.bad_samples import BadSampleQuota, ExcludedSamples
from hvdtrain.data.device_prefetch import prefetch_to
from hvdtrain.data.pipeline import dataset_of_draws, evaluation_of_draws, require_some
from hvdtrain.data.sample_draws import SampleDraws
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
        self._draws = SampleDraws(plan)
        self.iterator: Any = None

    @functools.cached_property
    def _dataset(self) -> tf.data.Dataset:
        return dataset_of_draws(self._source, self._draws)

    @property
    def element_spec(self) -> Any:
        """The tf.TypeSpec of the iterator's elements."""
        return self._dataset.element_spec

    def start(self, micro_batch: int) -> None:
        """Positions the iterator at a micro-batch of this rank, counted across epochs.

        The iterator stays the same object once it exists, so that a compiled step that reads it is not traced again.
        """
        require_some(self._source, self._excluded.numbers)
        self._draws.restart(self.plan, micro_batch, self._excluded.numbers)
        if self.iterator is None:
            self._batches = self._to_device(self._dataset)
            self.iterator = iter(self._batches)
        else:
            tf.raw_ops.MakeIterator(
                dataset=tf.data.experimental.to_variant(self._batches),
                iterator=tensorflow_internals.ITERATOR_RESOURCE.of(self.iterator),
            )

    def _to_device(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
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
        self._position = 0

    @functools.cached_property
    def _dataset(self) -> tf.data.Dataset:
        return evaluation_of_draws(self._source, lambda: self._batches()[self._position :])

    def _batches(self) -> list[np.ndarray]:
        """The sample numbers of each batch of this rank."""
        ranks, excluded = self._ranks, self._excluded.numbers
        return shard_batches(self._source.num_samples, self._batch_size, ranks.rank, ranks.size, excluded)

    @property
    def num_batches(self) -> int:
        """The batches of this rank."""
        return len(self._batches())

    def restart(self) -> None:
        """Starts at the first batch. Must be called before each evaluation."""
        self._position = 0
        self._make_iterator()

    def _make_iterator(self) -> None:
        require_some(self._source, self._excluded.numbers)
        self.iterator: Any = iter(self._dataset)

    def batch_done(self) -> None:
        """Records that a batch was evaluated."""
        self._position += 1

    def resume_after(self, error: Exception) -> None:
        """Like :meth:`TrainingFeed.resume_after`, for the current batch."""
        self._excluded.exclude_bad(self._batches()[self._position], error)
        self._make_iterator()
