"""The Source protocol: what the trainer requires of its input."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from hvdtrain.data.sample_plan import SamplePlan


@dataclasses.dataclass(frozen=True)
class BadSample:
    """A sample that cannot be read or parsed."""

    number: int
    """Its sample number; -1 if it has none."""
    where: str
    """Human-readable: ``/data/a.tfrecord, record 17 at offset 1234 bytes``. Records are counted from 0."""
    cause: str
    """Why it cannot be read or parsed."""


class Source(Protocol):
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

    @property
    def bad_samples(self) -> Sequence[BadSample]:
        """Bad samples found when the source was opened, the same on all ranks."""

    def facts(self) -> dict[str, Any]:
        """Facts that must be equal on all ranks."""

    def check_unchanged(self) -> None:
        """Raises DataError if a file has changed since it was opened."""

    def find_bad(self, numbers: np.ndarray) -> list[BadSample]:
        """Reads each of these samples separately and returns those that fail."""

    def training_batches(self, plan: SamplePlan, first_micro_batch: int, excluded: frozenset[int]) -> tf.data.Dataset:
        """Implements :func:`~hvdtrain.data.training_dataset`, which adds what is common to all sources."""

    def evaluation_batches(
        self, batch_size: int, rank: int, size: int, first_batch: int, excluded: frozenset[int]
    ) -> tf.data.Dataset:
        """Implements :func:`~hvdtrain.data.evaluation_dataset`, which adds what is common to all sources."""
