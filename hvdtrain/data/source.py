"""What the trainer needs of its input, wherever the samples are."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from hvdtrain.sampling import SamplePlan


@dataclasses.dataclass(frozen=True)
class BadSample:
    """A sample that cannot be read or parsed."""

    number: int
    """Its sample number; -1 when it never got one."""
    where: str
    """For people: ``/data/a.tfrecord, record 17 at offset 1234 bytes``. Records are counted from 0."""
    cause: str


class Source(Protocol):
    """Numbered samples that every rank can get at: 0 to ``num_samples - 1``."""

    @property
    def num_samples(self) -> int: ...
    @property
    def has_sample_weights(self) -> bool: ...
    @property
    def keeps_order(self) -> bool:
        """The order is the source's own: the plan must be one with ``shuffle=False``."""

    @property
    def can_change(self) -> bool:
        """Whether :meth:`check_unchanged` looks at anything."""

    @property
    def bad_samples(self) -> Sequence[BadSample]:
        """Those found when the source was opened; the same on every rank."""

    def facts(self) -> dict[str, Any]:
        """What must be equal on every rank."""

    def check_unchanged(self) -> None:
        """Raises DataError when a file is not the one that was opened."""

    def find_bad(self, numbers: np.ndarray) -> list[BadSample]:
        """Tries each of these samples alone and returns those that fail."""

    def training_batches(self, plan: SamplePlan, first_micro_batch: int, excluded: frozenset[int]) -> tf.data.Dataset:
        """As :func:`~hvdtrain.data.training_dataset`, which adds what is common to all sources."""

    def evaluation_batches(
        self, batch_size: int, rank: int, size: int, first_batch: int, excluded: frozenset[int]
    ) -> tf.data.Dataset:
        """As :func:`~hvdtrain.data.evaluation_dataset`, which adds what is common to all sources."""
