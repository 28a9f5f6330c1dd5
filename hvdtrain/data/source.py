"""The Source protocol: what the trainer requires of its input."""

from typing import Any, Protocol

import tensorflow as tf

from hvdtrain.data.bad_samples import FindsBadSamples
from hvdtrain.data.sample_plan import SamplePlan


class Source(FindsBadSamples, Protocol):
    """Samples numbered from 0 to ``num_samples - 1``, readable by every rank."""

    @property
    def num_samples(self) -> int:
        """The number of samples in an epoch, over all ranks."""

    @property
    def keeps_order(self) -> bool:
        """Whether the source has a fixed order: the plan must have ``shuffle=False``."""

    @property
    def can_change(self) -> bool:
        """Whether :meth:`check_unchanged` checks anything."""

    def facts(self) -> dict[str, Any]:
        """Facts that must be equal on all ranks."""

    def check_unchanged(self) -> None:
        """Raises DataError if a file has changed since it was opened."""

    def training_batches(self, plan: SamplePlan, first_micro_batch: int, excluded: frozenset[int]) -> tf.data.Dataset:
        """Implements :func:`~hvdtrain.data.training_dataset`, which adds what is common to all sources."""

    def evaluation_batches(
        self, batch_size: int, rank: int, size: int, first_batch: int, excluded: frozenset[int]
    ) -> tf.data.Dataset:
        """Implements :func:`~hvdtrain.data.evaluation_dataset`, which adds what is common to all sources."""
