"""Sampling plan: the global order of samples and each rank's slice of it. Does not import TensorFlow.

The order depends only on seed and epoch. The global batch of a step is the next ``global_batch_size``
samples of that order, cut into equal slices in rank order. With the same global batch size, any number
of ranks therefore trains on the same samples at the same step.
"""

import dataclasses

import numpy as np

from hvdtrain.errors import UsageError

REMAINDERS = ("pad", "drop")


@dataclasses.dataclass(frozen=True)
class Slice:
    """One rank's samples in one global micro-batch, as a range of positions in the epoch's order."""

    start: int
    count: int
    weight: float
    """Factor of the mean loss over these samples that makes the mean over ranks and micro-batches equal the
    mean over the step's samples: 1 in a full step, 0 for a filler."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplePlan:
    """Assigns samples to steps and ranks.

    A step is ``gradient_accumulation_steps`` micro-batches of ``batch_size`` samples on each rank.
    ``remainder`` decides about the last samples of an epoch if they do not fill a step:

    * ``pad``: they are distributed evenly over ranks and micro-batches. Each counts once; a rank without
      samples gets a filler, a sample of weight zero. The mean loss is exact.
    * ``drop``: they are dropped in this epoch (another epoch has another order and drops other samples).

    Raises:
        UsageError: there are fewer samples than ranks, or ``remainder`` is unknown or leaves no step.
    """

    num_samples: int
    batch_size: int
    rank: int = 0
    size: int = 1
    seed: int = 0
    shuffle: bool = True
    gradient_accumulation_steps: int = 1
    remainder: str = "pad"

    def __post_init__(self) -> None:
        if self.remainder not in REMAINDERS:
            raise UsageError(f"remainder must be one of {', '.join(REMAINDERS)}. Received: {self.remainder!r}")
        for name in ("batch_size", "gradient_accumulation_steps", "size"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1. Received: {getattr(self, name)}")
        if self.num_samples < self.size:
            raise UsageError(
                f"there must be at least one sample for each rank. Received: {self.num_samples} samples for "
                f"{self.size} ranks. Use fewer ranks or more data."
            )
        if self.steps_per_epoch == 0:
            raise UsageError(
                f"remainder='drop' leaves no step: {self.num_samples} samples, {self.global_batch_size} per step. "
                "Lower --batch-size, or use remainder='pad'."
            )

    @property
    def global_batch_size(self) -> int:
        """Samples of a full step over all ranks."""
        return self.batch_size * self.size * self.gradient_accumulation_steps

    @property
    def steps_per_epoch(self) -> int:
        full, rest = divmod(self.num_samples, self.global_batch_size)
        return full + (1 if rest and self.remainder == "pad" else 0)

    @property
    def is_even(self) -> bool:
        """Whether the weight is 1 in every micro-batch of every rank."""
        return self.remainder == "drop" or self._last_samples % (self.size * self.gradient_accumulation_steps) == 0

    @property
    def has_fillers(self) -> bool:
        """Whether any micro-batch of any rank is a filler."""
        return self.remainder == "pad" and 0 < self._last_samples < self.size * self.gradient_accumulation_steps

    @property
    def _last_samples(self) -> int:
        return self.num_samples % self.global_batch_size

    @property
    def samples_per_epoch(self) -> int:
        """Samples trained on in an epoch: all, or with ``drop`` those of full steps."""
        return min(self.num_samples, self.steps_per_epoch * self.global_batch_size)

    def order(self, epoch: int) -> np.ndarray:
        """The epoch's order: sample numbers, int64 ``[num_samples]``, equal on all ranks."""
        if not self.shuffle:
            return np.arange(self.num_samples)
        return np.random.Generator(np.random.Philox([self.seed, epoch])).permutation(self.num_samples)

    def epoch_seed(self, epoch: int) -> np.int32:
        """The epoch's part of the augmentation seeds, equal on all ranks."""
        return np.random.SeedSequence([self.seed, epoch]).generate_state(1).view(np.int32)[0]

    def numbers(self, micro_batch: int, excluded: frozenset[int] = frozenset()) -> np.ndarray:
        """The samples that this rank reads in a micro-batch, counted across epochs."""
        epoch, index = divmod(micro_batch, self.steps_per_epoch * self.gradient_accumulation_steps)
        step, part = divmod(index, self.gradient_accumulation_steps)
        taken = self.slices(step)[part]
        order, start, count = self.order(epoch), taken.start, taken.count
        if excluded:
            order, (start,), (count,), _ = exclude(excluded, order, np.array([start]), np.array([count]), np.ones(1))
        return order[start : start + count]

    def own_samples(self, first_step: int, steps: int) -> int:
        """The number of this rank's samples, without fillers, in a range of steps counted across epochs."""
        last = self.steps_per_epoch - 1
        total = 0
        for step in range(first_step, first_step + steps):
            if step % self.steps_per_epoch < last or self.remainder == "drop":
                total += self.batch_size * self.gradient_accumulation_steps
            else:
                total += sum(part.count for part in self.slices(last) if part.weight)
        return total

    def slices(self, step: int) -> list[Slice]:
        """This rank's micro-batches in a step of an epoch."""
        first = step * self.global_batch_size
        samples = min(self.global_batch_size, self.num_samples - first)
        parts = self.size * self.gradient_accumulation_steps
        result = []
        for micro_batch in range(self.gradient_accumulation_steps):
            part = micro_batch * self.size + self.rank
            start, end = part * samples // parts, (part + 1) * samples // parts
            count = end - start
            # Each rank's loss is a mean over its samples; the reduced gradient is a mean over parts.
            weight = count * parts / samples
            result.append(Slice(first + start, count, weight) if count else Slice(first, 1, 0.0))
        return result

    def epoch_slices(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """This rank's micro-batches in an epoch: starts, counts (int64) and weights (float64), one-dimensional."""
        slices = [part for step in range(self.steps_per_epoch) for part in self.slices(step)]
        return (
            np.array([part.start for part in slices], dtype=np.int64),
            np.array([part.count for part in slices], dtype=np.int64),
            np.array([part.weight for part in slices], dtype=np.float64),
        )


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
