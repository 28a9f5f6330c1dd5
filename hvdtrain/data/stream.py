"""Samples of any tf.data.Dataset, in its own order."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.data.pipeline import parallel_calls
from hvdtrain.data.source import BadSample
from hvdtrain.errors import DataError, UsageError
from hvdtrain.sampling import SamplePlan, shard

_ELEMENTS_COMPARED = 16
_READ_AHEAD = 16


class Stream:
    """Samples of a data set that can only be read from its beginning on.

    Every rank reads the whole data set and keeps its share, so that expensive work belongs into
    ``transform``, which is called for that share alone.

    Promised, if the data set yields the same elements in the same order on every rank and at every
    pass: each sample counts once an epoch over all ranks, each rank makes the same number of steps, the
    global batches are those of any other number of ranks, and a resumed run goes on with the sample it
    would have come to, for which it reads through the epoch up to there.

    Not promised: an order other than the data set's own (a seeded ``shuffle`` of its own does, within
    its buffer, but a resumed run may not meet the same order again), and the names of bad records: an
    error of the data set ends the job. Ranks that disagree in the first 16 elements, as after a shuffle
    without a seed, are refused.

    Args:
        dataset: single samples ``(x, y)`` or ``(x, y, sample_weight)``.
        num_samples: of one pass, which ends there; None: all, counted by one pass if the data set does
            not know. A pass that is shorter than this, or one that is not as long as the one counted,
            is an error.
        transform: from one sample's ``x, y[, sample_weight]`` to what the data set is to yield instead.

    Raises:
        UsageError: elements of another structure, no end, or ``num_samples`` that there are not.
        DataError: there is no sample.
    """

    keeps_order = True
    can_change = False
    bad_samples: Sequence[BadSample] = ()

    def __init__(
        self,
        dataset: tf.data.Dataset,
        *,
        num_samples: int | None = None,
        transform: Callable[..., tuple[Any, ...]] | None = None,
    ):
        known = int(dataset.cardinality())
        if num_samples is None and known == tf.data.INFINITE_CARDINALITY:
            raise UsageError("a data set without end needs num_samples: the samples of an epoch. Received: None")
        if num_samples is not None and (num_samples < 1 or 0 <= known < num_samples):
            raise UsageError(
                f"num_samples must be at least 1 and at most the data set's. Received: {num_samples}, of "
                f"{known if known >= 0 else 'an unknown number'}"
            )
        if num_samples is not None:
            dataset = dataset.take(num_samples)
        elif known == tf.data.UNKNOWN_CARDINALITY:
            num_samples = int(dataset.reduce(np.int64(0), lambda count, *_: count + 1))
        else:
            num_samples = known
        if num_samples == 0:
            raise DataError("the data set must hold at least one sample. Received: none")
        self.num_samples = num_samples
        # window() overlooks an error that comes with the end of its input, as that of a pass that is too
        # short does; prefetch() puts the error before the end.
        self._dataset = dataset.apply(tf.data.experimental.assert_cardinality(num_samples)).prefetch(_READ_AHEAD)
        self._transform = transform
        sample = self._transformed(self._dataset).element_spec
        if not isinstance(sample, tuple) or len(sample) not in (2, 3):
            raise UsageError(f"samples must be (x, y) or (x, y, sample_weight). Received: {sample}")
        self.has_sample_weights = len(sample) == 3

    def facts(self) -> dict[str, Any]:
        """The number of samples, what they look like, and a digest of the first 16."""
        digest = hashlib.sha256()
        for element in self._dataset.take(_ELEMENTS_COMPARED):
            for tensor in tf.nest.flatten(element, expand_composites=True):
                digest.update(tf.io.serialize_tensor(tensor).numpy())
        return {
            "samples": self.num_samples,
            "elements": str(self._dataset.element_spec),
            "digest": digest.hexdigest()[:12],
        }

    def check_unchanged(self) -> None:
        """Nothing that could be checked."""

    def find_bad(self, numbers: np.ndarray) -> list[BadSample]:
        """None: no sample can be read alone."""
        return []

    def training_batches(self, plan: SamplePlan, first_micro_batch: int, excluded: frozenset[int]) -> tf.data.Dataset:
        assert not excluded
        starts, counts, weights = plan.epoch_slices()
        starts = starts % plan.global_batch_size  # of each slice within its step
        slices = tf.data.Dataset.from_tensor_slices((starts, counts, weights)).batch(plan.accumulate)

        def one_epoch(_: tf.Tensor) -> tf.data.Dataset:
            steps = self._dataset.window(plan.global_batch_size, drop_remainder=plan.remainder == "drop")
            return tf.data.Dataset.zip(steps, slices).flat_map(micro_batches)

        def micro_batches(step: Any, step_slices: tuple[tf.Tensor, ...]) -> tf.data.Dataset:
            samples = tf.data.Dataset.zip(step)
            parts = tf.data.Dataset.from_tensor_slices(step_slices)
            return parts.map(lambda start, count, weight: (samples.skip(start).take(count), count, weight))

        def batch(samples: tf.data.Dataset, count: tf.Tensor, weight: tf.Tensor) -> tf.data.Dataset:
            factor = tf.cast(weight, keras.config.floatx())
            return self._transformed(samples).batch(count).map(lambda *data: (data, factor))

        epochs = tf.data.Dataset.range(np.iinfo(np.int64).max).flat_map(one_epoch)
        parts = epochs.skip(first_micro_batch % len(starts))
        return parts.interleave(batch, num_parallel_calls=parallel_calls())

    def evaluation_batches(
        self, batch_size: int, rank: int, size: int, first_batch: int, excluded: frozenset[int]
    ) -> tf.data.Dataset:
        assert not excluded
        mine = shard(self.num_samples, rank, size)
        samples = self._dataset.skip(mine.start).take(len(mine)).skip(first_batch * batch_size)
        return self._transformed(samples, num_parallel_calls=parallel_calls()).batch(batch_size)

    def _transformed(self, samples: tf.data.Dataset, num_parallel_calls: int | None = None) -> tf.data.Dataset:
        return samples if self._transform is None else samples.map(self._transform, num_parallel_calls)
