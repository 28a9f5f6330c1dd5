"""Sampling plan: the global order of samples and each rank's slice of it. Does not import TensorFlow.

The order depends only on seed and epoch. The global batch of a step is the next ``global_batch_size``
samples of that order, cut into slices in rank order. With the same global batch size, any number of
ranks therefore trains on the same samples at the same step, however large the slice of each rank is.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hvdtrain.config.wording import option
from hvdtrain.data.large_order import LargeOrder
from hvdtrain.errors import UsageError

REMAINDERS = ("pad", "drop")
MAX_IN_MEMORY = 1 << 24
"""The number of samples up to which their order is held in memory (128 MiB)."""


@dataclasses.dataclass(frozen=True)
class Slice:
    """One rank's samples in one global micro-batch, as a range of positions in the epoch's order."""

    start: int
    count: int
    weight: float
    """Factor of the mean loss over these samples that makes the mean over ranks and micro-batches equal the
    mean over the step's samples: 1 in a full step, 0 for a filler."""


class Position(NamedTuple):
    """The position of a step in the data."""

    epoch: int
    step: int
    """The number of the step within the plan's part of this epoch."""
    sample: int
    """The position of its first sample in the epoch's order."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplePlan:
    """Assigns samples to steps and ranks.

    A step is ``gradient_accumulation_steps`` micro-batches of ``batch_size`` samples on each rank, or of the rank's
    entry in ``rank_batch_sizes``. ``remainder`` decides what happens to the last samples of an epoch if they do not
    fill a step:

    * ``pad``: they are distributed over ranks and micro-batches, in proportion to their sizes in a full step. Each
      counts once; a rank without samples gets a filler, a sample of weight zero. The mean loss is exact.
    * ``drop``: they are dropped in this epoch (each epoch has a different order and drops different samples).

    Raises:
        UsageError: there are fewer samples than ranks, ``remainder`` is unknown or leaves no step, or
            ``rank_batch_sizes`` does not have a number for each rank.
    """

    num_samples: int
    batch_size: int
    rank: int = 0
    size: int = 1
    seed: int = 0
    shuffle: bool = True
    gradient_accumulation_steps: int = 1
    remainder: str = "pad"
    rank_batch_sizes: tuple[int, ...] | None = None
    """Samples of each rank in a full micro-batch; None: ``batch_size`` each."""
    first_step: int = 0
    """The first step of the plan; earlier steps may have had a different number of samples."""
    first_sample: int = 0
    """The first sample of the plan, counted across epochs."""

    def __post_init__(self) -> None:
        if self.remainder not in REMAINDERS:
            raise UsageError(f"remainder must be one of {', '.join(REMAINDERS)}. Received: {self.remainder!r}")
        for name in ("batch_size", "gradient_accumulation_steps", "size"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1. Received: {getattr(self, name)}")
        if not 0 <= self.rank < self.size:
            raise UsageError(f"rank must be from 0 to {self.size - 1}. Received: {self.rank}")
        sizes = self.rank_batch_sizes
        if sizes is not None and (len(sizes) != self.size or min(sizes) < 0 or sum(sizes) < 1):
            raise UsageError(
                f"rank_batch_sizes must be {self.size} numbers from 0, not all of them 0. Received: {sizes}"
            )
        if self.num_samples < self.size:
            raise UsageError(
                f"there must be at least one sample for each rank. Received: {self.num_samples} samples for "
                f"{self.size} ranks. Use fewer ranks or more data."
            )
        if self.steps_per_epoch == 0:
            raise UsageError(
                f"remainder='drop' leaves no step: {self.num_samples} samples, {self.global_batch_size} per step. "
                f"Lower {option('batch_size')}, or use {option('remainder', 'pad')}."
            )

    @property
    def micro_batch_size(self) -> int:
        """Samples of a full micro-batch over all ranks."""
        return self.batch_size * self.size if self.rank_batch_sizes is None else sum(self.rank_batch_sizes)

    @property
    def global_batch_size(self) -> int:
        """Samples of a full step over all ranks."""
        return self.micro_batch_size * self.gradient_accumulation_steps

    @property
    def steps_per_epoch(self) -> int:
        return self._num_steps(self.num_samples)

    def _num_steps(self, samples: int) -> int:
        full, rest = divmod(samples, self.global_batch_size)
        return full + (1 if rest and self.remainder == "pad" else 0)

    def first_step_of(self, epoch: int) -> int:
        """The first step of an epoch, if the plan assigns all samples of the epoch."""
        whole_epoch, rest = -(-self.first_sample // self.num_samples), -self.first_sample % self.num_samples
        return self.first_step + self._num_steps(rest) + (epoch - whole_epoch) * self.steps_per_epoch

    def first_sample_of(self, epoch: int) -> int:
        """The position in an epoch's order at which the plan begins: 0 except in the epoch of ``first_sample``."""
        first_epoch, position = divmod(self.first_sample, self.num_samples)
        return position if epoch == first_epoch else 0

    def position(self, step: int) -> Position:
        """The position in the data of a step, counted across epochs."""
        whole_epoch = -(-self.first_sample // self.num_samples)
        epochs, index = divmod(step - self.first_step_of(whole_epoch), self.steps_per_epoch)
        if epochs < 0:  # in the rest of an epoch that the plan begins with
            epochs, index = -1, step - self.first_step
        epoch = whole_epoch + epochs
        return Position(epoch, index, self.first_sample_of(epoch) + index * self.global_batch_size)

    @property
    def is_even(self) -> bool:
        """Whether the weight is 1 in every micro-batch of every rank."""
        return all((counts == counts[0]).all() for counts in self._counts_of_steps())

    @property
    def has_fillers(self) -> bool:
        """Whether any micro-batch of any rank is a filler."""
        return any((counts == 0).any() for counts in self._counts_of_steps())

    def _counts_of_steps(self) -> list[np.ndarray]:
        """The numbers of samples in the micro-batches of all ranks, for a full step and, if it differs, the last
        one."""
        full, rest = divmod(self.num_samples, self.global_batch_size)
        samples = [self.global_batch_size] if full else []
        if rest and self.remainder == "pad":
            samples.append(rest)
        return [np.diff(self._bounds(each)) for each in samples]

    def _bounds(self, samples: int) -> np.ndarray:
        """The start of each micro-batch in a step of ``samples`` samples, and the end of the last one."""
        sizes = (self.batch_size,) * self.size if self.rank_batch_sizes is None else self.rank_batch_sizes
        full = np.cumsum((0, *sizes * self.gradient_accumulation_steps))
        return full * samples // self.global_batch_size

    @property
    def samples_per_epoch(self) -> int:
        """Samples trained on in an epoch: all, or with ``drop`` those of full steps."""
        return min(self.num_samples, self.steps_per_epoch * self.global_batch_size)

    @property
    def computes_order(self) -> bool:
        """Whether there are too many samples to hold their order in memory: it is computed on access."""
        return self.num_samples > MAX_IN_MEMORY

    def order(self, epoch: int) -> np.ndarray | LargeOrder:
        """The epoch's order: sample numbers, int64 ``[num_samples]``, equal on all ranks."""
        if self.computes_order:
            return LargeOrder(self.num_samples, (self.seed, epoch) if self.shuffle else None)
        if not self.shuffle:
            return np.arange(self.num_samples)
        return np.random.Generator(np.random.Philox([self.seed, epoch])).permutation(self.num_samples)

    def epoch_seed(self, epoch: int) -> np.int32:
        """The epoch's part of the augmentation seeds, equal on all ranks."""
        return np.random.SeedSequence([self.seed, epoch]).generate_state(1).view(np.int32)[0]

    def epoch_of(self, micro_batch: int) -> int:
        """The epoch of a micro-batch, counted across epochs."""
        return self.position(micro_batch // self.gradient_accumulation_steps).epoch

    def numbers(self, micro_batch: int, excluded: frozenset[int] = frozenset()) -> np.ndarray:
        """The samples that this rank reads in a micro-batch, counted across epochs."""
        return self.draw(micro_batch, excluded)[0]

    def draw(self, micro_batch: int, excluded: frozenset[int] = frozenset()) -> tuple[np.ndarray, float]:
        """The samples that this rank reads in a micro-batch, counted across epochs, and their weight.

        Excluded samples are removed as by :func:`exclude`.
        """
        step, part = divmod(micro_batch, self.gradient_accumulation_steps)
        position = self.position(step)
        taken = self._slices_from(position.sample)[part]
        order = self.order(position.epoch)
        numbers = order[taken.start : taken.start + taken.count]
        if not excluded:
            return numbers, taken.weight
        kept = _without(excluded, numbers)
        if not len(kept):
            # The filler: of one sample more than are excluded, at least one is left.
            return _without(excluded, order[: len(excluded) + 1])[:1], 0.0
        return kept, taken.weight * len(kept) / taken.count

    def own_samples(self, first_step: int, steps: int) -> int:
        """The number of this rank's samples, without fillers, in a range of steps counted across epochs.

        The plan must begin with the first sample.
        """
        last = self.steps_per_epoch - 1
        full_count, last_count = (sum(part.count for part in self.slices(step) if part.weight) for step in (0, last))
        num_last = (first_step + steps) // (last + 1) - first_step // (last + 1)
        return (steps - num_last) * full_count + num_last * last_count

    def slices(self, step: int) -> list[Slice]:
        """This rank's micro-batches in a step of an epoch."""
        return self._slices_from(step * self.global_batch_size)

    def _slices_from(self, first: int) -> list[Slice]:
        samples = min(self.global_batch_size, self.num_samples - first)
        bounds = [int(each) for each in self._bounds(samples)]
        result = []
        for part in range(self.rank, self.size * self.gradient_accumulation_steps, self.size):
            start, count = bounds[part], bounds[part + 1] - bounds[part]
            # Each rank's loss is a mean over its samples; the reduced gradient is a mean over parts.
            weight = count * self.size * self.gradient_accumulation_steps / samples
            result.append(Slice(first + start, count, weight) if count else Slice(first, 1, 0.0))
        return result

    def epoch_slices(self, first: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """This rank's micro-batches in an epoch: starts, counts (int64) and weights (float64), one-dimensional.

        Args:
            first: the position in the epoch's order at which they begin.
        """
        last = self._num_steps(self.num_samples - first) - 1
        full_steps = self.global_batch_size * np.arange(last, dtype=np.int64)
        full, rest = (
            np.array([(part.start, part.count, part.weight) for part in self._slices_from(start)])
            for start in (first, first + last * self.global_batch_size)
        )
        starts = np.concatenate([np.add.outer(full_steps, full[:, 0].astype(np.int64)).ravel(), rest[:, 0]])
        counts, weights = (np.concatenate([np.tile(full[:, i], last), rest[:, i]]) for i in (1, 2))
        return starts.astype(np.int64), counts.astype(np.int64), weights


def split_batch(samples: int, weights: Sequence[float], most: int) -> tuple[int, ...]:
    """Splits samples over ranks in proportion to their weights, at most ``most`` for each; at least 1 if its weight
    is not 0.

    Raises:
        UsageError: there are fewer samples than ranks with a weight, or more than the ranks may have.
    """
    wanted = np.asarray(weights, np.float64) * (samples / sum(weights))
    least = (wanted > 0).astype(np.int64)
    if not least.sum() <= samples <= most * least.sum():
        raise UsageError(
            f"each rank must have from 1 to {most} samples of a micro-batch. Received: {samples} samples for "
            f"{least.sum()} ranks. Change {option('batch_size')}, or increase {option('max_batch_size')}."
        )
    sizes = np.clip(np.floor(wanted).astype(np.int64), least, most * least)
    while missing := samples - int(sizes.sum()):
        # One at a time, to or from the rank that is furthest from its proportion and can still change.
        step = 1 if missing > 0 else -1
        can_change = (least > 0) & (sizes < most if step > 0 else sizes > least)
        sizes[np.argmax(np.where(can_change, step * (wanted - sizes), -np.inf))] += step
    return tuple(int(each) for each in sizes)


def shard(num_samples: int, rank: int, size: int) -> range:
    """A rank's contiguous shard for evaluation: each sample once over all ranks, shard sizes may differ."""
    return range(rank * num_samples // size, (rank + 1) * num_samples // size)


def shard_batches(
    num_samples: int, batch_size: int, rank: int, size: int, excluded: frozenset[int] = frozenset()
) -> list[np.ndarray]:
    """A rank's shard in batches, without the excluded samples; batches that become empty are dropped."""
    mine = shard(num_samples, rank, size)
    numbers = np.arange(mine.start, mine.stop, dtype=np.int64)
    batches = [numbers[start : start + batch_size] for start in range(0, len(numbers), batch_size)]
    if excluded:
        dropped = np.fromiter(excluded, np.int64)
        batches = [batch[~np.isin(batch, dropped)] for batch in batches]
    return [batch for batch in batches if len(batch)]


def _without(excluded: frozenset[int], numbers: np.ndarray) -> np.ndarray:
    return numbers[~np.isin(numbers, np.fromiter(excluded, np.int64))]


def exclude(
    excluded: frozenset[int], order: np.ndarray, starts: np.ndarray, counts: np.ndarray, weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Removes samples from the order and slices of an epoch (see :meth:`SamplePlan.epoch_slices`).

    Each slice's weight shrinks with its samples. A slice that becomes empty is replaced by a filler.
    """
    kept = ~np.isin(order, np.fromiter(excluded, np.int64))
    kept_before = np.concatenate([[0], np.cumsum(kept)])
    left = kept_before[starts + counts] - kept_before[starts]
    new_starts = np.where(left > 0, kept_before[starts], 0)
    return order[kept], new_starts, np.maximum(left, 1), weights * left / counts
