"""The Source protocol: what the trainer requires of its input."""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from hvdtrain.data.bad_samples import FindsBadSamples
from hvdtrain.data.sample_draws import SampleDraws


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

    def training_batches(self, draws: SampleDraws) -> tf.data.Dataset:
        """Implements :func:`~hvdtrain.data.training_dataset`, which adds what is common to all sources.

        What is drawn may change between iterations of the dataset.
        """

    def evaluation_batches(self, draw: Callable[[], list[np.ndarray]]) -> tf.data.Dataset:
        """Implements :func:`~hvdtrain.data.evaluation_dataset`, which adds what is common to all sources.

        Args:
            draw: the sample numbers of each batch, called in each iteration. Batches are consecutive parts of a range,
                without those that are excluded, and equally long but for the last one.
        """
