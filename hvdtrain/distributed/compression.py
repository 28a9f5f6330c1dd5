"""What a compression of gradients is; users implement their own."""

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from hvdtrain.distributed.gradient_reduction import StepSum
from hvdtrain.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The ranks that reduce together, while a step is traced."""

    count: int | tf.Tensor
    """Their number; a tensor if it may change."""
    sum: StepSum

    def mean(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The mean of each tensor over ranks; all ranks must call it."""
        return [total / tf.cast(self.count, total.dtype) for total in self.sum(tensors)]


class Compressed(NamedTuple):
    """The outcome of a compressed reduction."""

    means: Sequence[tf.Tensor]
    """An approximation of the mean of each tensor over ranks, equal on all ranks."""
    own: Sequence[tf.Tensor]
    """What was sent of each of this rank's tensors. The rest is added to the next step's: error feedback."""
    state: Mapping[str, tf.Tensor]
    """The state for the next step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compression(abc.ABC):
    """How the gradients of a step are reduced with fewer bytes. Subclass it for your own compression.

    The reduction around it keeps the compression error of each gradient, and adds it to the next step's gradient (error
    feedback; Karimireddy et al., arXiv:1901.09847). If a step's reduced gradients are not finite, neither the errors
    nor the state change.
    """

    start_after: int = 0
    """Number of first steps whose gradients are sent uncompressed."""

    def __post_init__(self) -> None:
        if self.start_after < 0:
            raise UsageError(f"start_after must be at least 0. Received: {self.start_after}")

    @abc.abstractmethod
    def num_bytes(self, gradient: tf.TensorSpec) -> int | None:
        """The bytes that a rank passes to the allreduce for a gradient; None: send it uncompressed."""

    def initial_state(self, gradients: Sequence[tf.TensorSpec]) -> dict[str, np.ndarray]:
        """The values that the first step starts with, equal on all ranks. By default, none.

        Args:
            gradients: the gradients that are compressed; float32, or float64.
        """
        return {}

    @abc.abstractmethod
    def reduce(self, gradients: Sequence[tf.Tensor], state: Mapping[str, tf.Tensor], ranks: Ranks) -> Compressed:
        """Reduces gradients over ranks; called while a step is traced.

        Must be a function of its arguments: random numbers that differ between ranks would make replicas differ.
        """
