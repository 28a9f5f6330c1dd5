"""Samples from any tf.data.Dataset, in the dataset's order."""

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.data.bad_samples import BadSample
from hvdtrain.data.kept_order import in_order
from hvdtrain.data.numbered import as_keras_packs
from hvdtrain.data.pipeline import NUMBER, NUMBERS, asked_when_iterated, parallel_calls
from hvdtrain.data.sample_draws import SampleDraws
from hvdtrain.distributed import runtime
from hvdtrain.distributed.untuned_datasets import without_autotuning
from hvdtrain.errors import DataError, UsageError
from hvdtrain.system import environment
from hvdtrain.system.terminal import report

_ELEMENTS_COMPARED = 16
_READ_AHEAD = 16
_COUNTED_AT_ONCE = 100
_SAYS_AFTER_S, _ENDS_AFTER_S = 10.0, 600.0
_REMEDY = "Pass hvdtrain.data.Stream(dataset, num_samples=…)"


class Stream:
    """Samples of a dataset that can only be read sequentially.

    Every rank reads the whole dataset and keeps its share. Put expensive work into ``transform``, which is
    called only for that share.

    Guaranteed if the dataset yields the same elements in the same order on every rank and in every pass:
    each sample is used once per epoch over all ranks, all ranks make the same number of steps, global
    batches do not depend on the number of ranks, and a resumed run continues at the next sample (it reads
    and discards the epoch up to there).

    Not guaranteed: reshuffling (the dataset may contain a seeded ``shuffle``, within its buffer, but a
    resumed run may see another order), and locating bad records: an error in the dataset ends the job.
    Ranks whose first 16 elements differ, as after a ``shuffle`` without a seed, are rejected.

    Args:
        dataset: samples x, ``(x, y)`` or ``(x, y, sample_weight)``, or batches of them.
        num_samples: samples per epoch; None: all, counted in one pass if the cardinality is unknown. A
            pass that is shorter than this, or differs from the counted length, is an error.
        transform: maps one sample's ``x[, y[, sample_weight]]`` to the sample to train on.
        batched: whether elements are batches. They are split into samples, which costs time: leave out ``batch`` if you
            can. None: they are batches if the length of the first dimension of all components is unknown.

    Raises:
        UsageError: elements have another structure, the dataset is infinite or cannot be counted within 600 s and
            ``num_samples`` is None, ``num_samples`` exceeds the dataset, or ranks would see it in different orders.
        DataError: the dataset is empty.
    """

    keeps_order = True
    can_change = False
    bad_samples: Sequence[BadSample] = ()

    def __init__(
        self,
        dataset: tf.data.Dataset,
        *,
        num_samples: int | None = None,
        transform: Callable[..., Any] | None = None,
        batched: bool | None = None,
    ):
        if runtime.collectives().size > 1:
            dataset = in_order(dataset)
        dataset = without_autotuning(dataset)
        known = int(dataset.cardinality())
        if num_samples is None and known == tf.data.INFINITE_CARDINALITY:
            raise UsageError("an infinite dataset needs num_samples, the samples per epoch. Received: None")
        if _is_batched(dataset.element_spec) if batched is None else batched:
            dataset = dataset.unbatch()
            known = tf.data.UNKNOWN_CARDINALITY
        if num_samples is not None and (num_samples < 1 or 0 <= known < num_samples):
            raise UsageError(
                f"num_samples must be at least 1 and at most the size of the dataset. Received: {num_samples} of "
                f"{known if known >= 0 else 'an unknown number'}"
            )
        if num_samples is not None:
            dataset = dataset.take(num_samples)
        elif known == tf.data.UNKNOWN_CARDINALITY:
            num_samples = _count(dataset)
        else:
            num_samples = known
        if num_samples == 0:
            raise DataError("the dataset must have at least one sample. Received: none")
        self.num_samples = num_samples
        # window() ignores an error that is raised at the end of its input, as assert_cardinality does after a pass that
        # is too short. prefetch() delivers the error before the end.
        self._dataset = dataset.apply(tf.data.experimental.assert_cardinality(num_samples)).prefetch(_READ_AHEAD)
        self._transform = transform
        sample = self._transformed(self._dataset).element_spec
        if isinstance(sample, tuple) and len(sample) not in (1, 2, 3):
            raise UsageError(f"samples must be x, (x, y) or (x, y, sample_weight). Received: {sample}")

    def facts(self) -> dict[str, Any]:
        """The number of samples, their element spec, and a digest of the first 16."""
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
        """Does nothing: a dataset cannot be checked."""

    def find_bad(self, numbers: np.ndarray) -> list[BadSample]:
        """Returns an empty list: samples cannot be read separately."""
        return []

    def training_batches(self, draws: SampleDraws) -> tf.data.Dataset:
        drops_rest, micro_batches_per_step = draws.plan.remainder == "drop", draws.plan.gradient_accumulation_steps

        def ask() -> tuple[Any, ...]:
            assert not draws.excluded
            starts, counts, weights = draws.plan.epoch_slices()
            samples = draws.plan.global_batch_size
            # Starts of each slice within its step.
            return draws.first() % len(starts), np.int64(samples), starts % samples, counts, weights

        def from_first(skipped: tf.Tensor, samples_per_step: tf.Tensor, *slices: tf.Tensor) -> tf.data.Dataset:
            by_step = tf.data.Dataset.from_tensor_slices(slices).batch(micro_batches_per_step)

            def one_epoch(_: tf.Tensor) -> tf.data.Dataset:
                steps = self._dataset.window(samples_per_step, drop_remainder=drops_rest)
                return tf.data.Dataset.zip(steps, by_step).flat_map(micro_batches)

            return tf.data.Dataset.range(np.iinfo(np.int64).max).flat_map(one_epoch).skip(skipped)

        def micro_batches(step: Any, step_slices: tuple[tf.Tensor, ...]) -> tf.data.Dataset:
            samples = tf.data.Dataset.zip(step)
            parts = tf.data.Dataset.from_tensor_slices(step_slices)
            return parts.map(lambda start, count, weight: (samples.skip(start).take(count), count, weight))

        def batch(samples: tf.data.Dataset, count: tf.Tensor, weight: tf.Tensor) -> tf.data.Dataset:
            factor = tf.cast(weight, keras.config.floatx())
            return self._transformed(samples).batch(count).map(lambda *data: (as_keras_packs(data), factor))

        specs = [NUMBER, NUMBER, NUMBERS, NUMBERS, tf.TensorSpec([None], tf.float64)]
        parts = asked_when_iterated(ask, specs, from_first)
        return parts.interleave(batch, num_parallel_calls=parallel_calls())

    def evaluation_batches(self, draw: Callable[[], list[np.ndarray]]) -> tf.data.Dataset:
        def ask() -> tuple[np.int64, np.int64, np.int64]:
            batches = draw()
            first = batches[0][0] if batches else 0
            longest = max(map(len, batches), default=1)
            return np.int64(first), np.int64(sum(map(len, batches))), np.int64(longest)

        def share(first: tf.Tensor, count: tf.Tensor, batch_size: tf.Tensor) -> tf.data.Dataset:
            samples = self._dataset.skip(first).take(count)
            return self._transformed(samples, num_parallel_calls=parallel_calls()).batch(batch_size)

        return asked_when_iterated(ask, [NUMBER] * 3, share)

    def _transformed(self, samples: tf.data.Dataset, num_parallel_calls: int | None = None) -> tf.data.Dataset:
        return samples if self._transform is None else samples.map(self._transform, num_parallel_calls)


def _count(dataset: tf.data.Dataset) -> int:
    """The number of samples, which are read once for it.

    Raises:
        UsageError: counting takes too long: the data set may have no end.
    """
    begin_s, num_samples, has_said = time.monotonic(), 0, False
    ones = dataset.map(lambda *_: np.int64(1)).batch(_COUNTED_AT_ONCE).map(tf.size)
    for number in ones:
        num_samples += int(number)
        took_s = time.monotonic() - begin_s
        if took_s > _SAYS_AFTER_S and not has_said and environment.launcher().rank == 0:
            has_said = True
            report(
                0,
                f"counting the samples of a data set of unknown length: {num_samples} so far. {_REMEDY} to begin at "
                "once, or if it has no end.",
            )
        if took_s > _ENDS_AFTER_S:
            raise UsageError(
                "a data set of unknown length must end: its samples are counted before the first step. Received: one "
                f"with {num_samples} samples after {took_s:.0f} s. {_REMEDY}: the number of samples in an epoch."
            )
    return num_samples


def _is_batched(element_spec: Any) -> bool:
    shapes = [spec.shape for spec in tf.nest.flatten(element_spec)]
    return all(shape.rank is not None and shape.rank > 0 and shape[0] is None for shape in shapes)
