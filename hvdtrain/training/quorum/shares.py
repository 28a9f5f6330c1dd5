"""Which samples of an epoch each rank has left. Does not import TensorFlow.

At first, each rank has the micro-batches that the sample plan assigns to it, so that without stragglers every step has
the samples of a step in sync mode. A rank that misses a step still has its micro-batch. When a rank has none left, the
rest of the epoch is redistributed. Everything follows from who contributed to each step: all ranks compute the same.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from hvdtrain.data.sample_plan import SamplePlan, split_batch


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """Samples that a rank trains on together."""

    epoch: int
    deal: int
    """How often the rest of the epoch had been redistributed."""
    index: int
    """Its number among those of this rank in this deal."""
    count: int
    """Its number of samples."""


class EpochShares:
    """The micro-batches that each rank has left in an epoch.

    Args:
        plan: of any rank.
    """

    def __init__(self, plan: SamplePlan, epoch: int = 0):
        self.plan = plan
        self.epoch = epoch
        self.deal = 0
        self.samples = 0
        """Samples of this epoch that were trained on."""
        self.positions: np.ndarray | None = None
        """The samples of the last redistribution, as positions in the epoch's order, int64; None: there was none
        yet."""
        self.sizes: list[int] = []
        """How many of these positions each rank got, in rank order."""
        self._plans = [dataclasses.replace(plan, rank=rank) for rank in range(plan.size)]
        self._num_contributed = [0] * plan.size
        self._start([self._num_planned(each) for each in self._plans])

    def _start(self, num_batches: Sequence[int]) -> None:
        self._num_batches = list(num_batches)
        self._next = [0] * self.plan.size

    @staticmethod
    def _num_planned(plan: SamplePlan) -> int:
        last = plan.steps_per_epoch - 1
        return last + 1 if plan.slices(last)[0].weight else last  # A filler is not a sample.

    @property
    def largest_batch(self) -> int:
        """The largest micro-batch after a redistribution: what every rank has in a full step."""
        return min(self._batch_sizes)

    @property
    def _batch_sizes(self) -> tuple[int, ...]:
        """Samples of each rank in a full step."""
        return self.plan.rank_batch_sizes or (self.plan.batch_size,) * self.plan.size

    def num_left(self) -> list[int]:
        """The number of micro-batches that each rank has left."""
        return [total - made for total, made in zip(self._num_batches, self._next, strict=True)]

    @property
    def is_complete(self) -> bool:
        return not any(self.num_left())

    def next_of(self, rank: int) -> MicroBatch | None:
        """The micro-batch that a rank makes next; None if it has none left."""
        index = self._next[rank]
        if index == self._num_batches[rank]:
            return None
        return MicroBatch(self.epoch, self.deal, index, self._bounds(rank, index)[1])

    def _bounds(self, rank: int, index: int) -> tuple[int, int]:
        """Start and count of a micro-batch: among the redistributed positions, or in the epoch's order."""
        if self.positions is None:
            part = self._plans[rank].slices(index)[0]
            return part.start, part.count
        first, most = index * self.largest_batch, self.largest_batch
        return sum(self.sizes[:rank]) + first, min(most, self.sizes[rank] - first)

    def starts_and_counts(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """All micro-batches of a rank in this deal; int64, one-dimensional."""
        bounds = [self._bounds(rank, index) for index in range(self._num_batches[rank])]
        table = np.array(bounds, np.int64).reshape(-1, 2)
        return table[:, 0], table[:, 1]

    def positions_of(self, rank: int, index: int) -> np.ndarray:
        """The samples of a micro-batch, as positions in the epoch's order."""
        start, count = self._bounds(rank, index)
        own = np.arange(start, start + count)
        return own if self.positions is None else self.positions[own]

    def contribute(self, ranks: Collection[int]) -> None:
        """Counts the next micro-batch of each of these ranks as trained on; redistributes the rest when a rank runs
        out."""
        for rank in ranks:
            self.samples += self._bounds(rank, self._next[rank])[1]
            self._next[rank] += 1
            self._num_contributed[rank] += 1
        left = self.num_left()
        if min(left) == 0 and max(left) > 1:
            self._deal()

    def _deal(self) -> None:
        rest = self.rest()
        sizes = self.dealt_sizes(len(rest))
        self.deal += 1
        self._set_deal(rest, sizes)

    def _set_deal(self, positions: np.ndarray, sizes: Sequence[int]) -> None:
        self.positions, self.sizes = positions, list(sizes)
        self._start([-(-size // self.largest_batch) for size in sizes])

    def rest(self) -> np.ndarray:
        """The samples that were not trained on, as sorted positions in the epoch's order."""
        parts = [
            self.positions_of(rank, index)
            for rank in range(self.plan.size)
            for index in range(self._next[rank], self._num_batches[rank])
        ]
        return np.sort(np.concatenate(parts)) if parts else np.zeros(0, np.int64)

    def dealt_sizes(self, samples: int) -> tuple[int, ...]:
        """Divides samples by speed: in proportion to how often each rank has contributed in this epoch.

        Samples of one step are divided so that every rank makes one micro-batch.
        """
        size, most = self.plan.size, self.largest_batch
        weights = [1 + each for each in self._num_contributed]
        if samples < size:
            fastest = sorted(range(size), key=lambda rank: (-weights[rank], rank))[:samples]
            return tuple(int(rank in fastest) for rank in range(size))
        return split_batch(samples, weights, most if samples <= most * size else samples)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {
            "epoch": self.epoch,
            "deal": self.deal,
            "samples": self.samples,
            "positions": self.positions,
            "sizes": list(self.sizes),
            "next": list(self._next),
            "contributed": list(self._num_contributed),
            "batch_sizes": list(self._batch_sizes),
        }

    @classmethod
    def restored(cls, plan: SamplePlan, state: Mapping[str, Any]) -> "EpochShares":
        """What :meth:`state` described; with a different number of ranks, the rest of the epoch is redistributed."""
        sizes = tuple(state["batch_sizes"])
        if len(sizes) == plan.size:
            return cls._restored(plan, state)
        before = cls._restored(dataclasses.replace(plan, rank=0, size=len(sizes), rank_batch_sizes=sizes), state)
        shares = cls(plan, before.epoch)
        if before.samples:
            rest = before.rest()
            shares.samples, shares.deal = before.samples, before.deal + 1
            shares._set_deal(rest, shares.dealt_sizes(len(rest)))
        return shares

    @classmethod
    def _restored(cls, plan: SamplePlan, state: Mapping[str, Any]) -> "EpochShares":
        shares = cls(plan, state["epoch"])
        shares.samples, shares.deal = state["samples"], state["deal"]
        shares._num_contributed = list(state["contributed"])
        if state["positions"] is not None:
            shares._set_deal(np.asarray(state["positions"], np.int64), state["sizes"])
        shares._next = list(state["next"])
        return shares
