"""Which samples a dataset reads, asked each time that it begins to be iterated. Does not import TensorFlow."""

import numpy as np

from hvdtrain.data.sample_plan import SamplePlan, exclude


class SampleDraws:
    """This rank's micro-batches from one on, without samples that are excluded.

    A dataset that asks for them can be iterated again from another micro-batch, or with another plan for the same
    source, without being traced again. Arrays are copies, because TensorFlow takes over those it receives, and
    operations may write their results into them.
    """

    def __init__(self, plan: SamplePlan, first_micro_batch: int = 0, excluded: frozenset[int] = frozenset()):
        self.restart(plan, first_micro_batch, excluded)

    def restart(self, plan: SamplePlan, first_micro_batch: int, excluded: frozenset[int]) -> None:
        """Changes what is read from the next iteration on."""
        self.plan = plan
        self.excluded = excluded
        self._first_micro_batch = first_micro_batch
        self._slices_of_whole_epoch: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    def first(self) -> np.int64:
        """The first micro-batch, counted across epochs."""
        return np.int64(self._first_micro_batch)

    def first_in_epoch(self) -> tuple[np.int64, np.int64]:
        """The epoch of the first micro-batch, and its number among the plan's micro-batches of that epoch."""
        step, part = divmod(self._first_micro_batch, self.plan.gradient_accumulation_steps)
        position = self.plan.position(step)
        return np.int64(position.epoch), np.int64(position.step * self.plan.gradient_accumulation_steps + part)

    def epoch(self, number: np.int64) -> tuple[np.int32, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The seed of an epoch, its order, and the starts, counts and weights of the slices of its order."""
        epoch = int(number)
        order = self.plan.order(epoch)
        assert isinstance(order, np.ndarray)
        starts, counts, weights = self._slices(self.plan.first_sample_of(epoch))
        if self.excluded:
            order, starts, counts, weights = exclude(self.excluded, order, starts, counts, weights)
        return self.plan.epoch_seed(epoch), order, starts.copy(), counts.copy(), weights.copy()

    def _slices(self, first_sample: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if first_sample:
            return self.plan.epoch_slices(first_sample)
        if self._slices_of_whole_epoch is None:
            self._slices_of_whole_epoch = self.plan.epoch_slices()
        return self._slices_of_whole_epoch

    def micro_batch(self, number: np.int64) -> tuple[np.int32, np.ndarray, np.float64]:
        """The seed of the epoch of a micro-batch, counted across epochs, its sample numbers and its weight."""
        numbers, weight = self.plan.draw(int(number), self.excluded)
        return self.plan.epoch_seed(self.plan.epoch_of(int(number))), numbers, np.float64(weight)
