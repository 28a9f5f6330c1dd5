"""The operations that all ranks perform together: a protocol, so that tests can count and replace them."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from hvdtrain.config.exclusions import Condition
from hvdtrain.distributed.config import ReductionConfig
from hvdtrain.distributed.gradient_reduction import GradientReducer, StepSum


class Collectives(Protocol):
    """Collective operations: all ranks must call them, in the same order."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def local_size(self) -> int: ...
    @property
    def cross_rank(self) -> int: ...
    @property
    def cross_size(self) -> int: ...

    @property
    def reduces(self) -> bool:
        """Whether compiled steps must reduce: there are several ranks, or there may be later."""

    @property
    def may_change(self) -> bool:
        """Whether other ranks may train together later."""

    @property
    def conditions(self) -> Sequence[Condition]:
        """What these ranks are, for the rules of :mod:`hvdtrain.config.exclusions`."""

    def num_ranks(self) -> int | tf.Tensor:
        """The number of ranks when a compiled step runs: a tensor if it may change."""

    def sum(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Each array summed over ranks; shapes and dtypes must be the same on every rank."""

    def sum_tensors(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Each tensor summed over ranks, on its device. Any thread may call it, with each name once at a time."""

    def sum_on_this_thread(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Each tensor summed over ranks, without TensorFlow's threads, which a compiled step may occupy.

        Any thread may call it, while no other thread of this process is in a collective.
        """

    def host_collectives(self) -> "Collectives":
        """The collectives of the ranks on this rank's host, as :meth:`split` makes them."""

    def split(self, groups: Sequence[Sequence[int]]) -> "Collectives":
        """The collectives of this rank's group; those of a single process if it is in no group, or alone in one.

        All ranks must call it, with the same groups, which share no rank. Horovod must have been started with
        ``hvdtrain.init(process_sets=True)``.
        """

    def mpi_sum(self, array: np.ndarray) -> np.ndarray | None:
        """The sum by a bare MPI_Allreduce, for comparison; None if MPI does not connect the ranks."""

    def broadcast(self, variables: Sequence[tf.Variable], root_rank: int = 0) -> None:
        """Overwrites the variables with those of ``root_rank``."""

    def allgather(self, value: Any) -> list[Any]:
        """The picklable value of each rank, in rank order."""

    def alltoall(self, pieces: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Sends one vector of bytes to each rank; returns the one from each rank, in rank order.

        Unlike :meth:`allgather`, only the receiver holds a vector. Lengths may differ and be 0; those that one rank
        sends or receives must be less than 2 GiB together.
        """

    def barrier(self) -> None:
        """Waits for every rank."""

    def gradient_reducer(self, config: ReductionConfig) -> GradientReducer:
        """A function that reduces the gradients of one step over ranks; it works inside a tf.function.

        Ranks must first call their reducers in the same order: that order names the reductions.
        """

    def step_sum(self, num_buckets: int | None = None) -> StepSum:
        """A function that sums tensors over ranks inside a tf.function; float16 is sent and summed in float16.

        Ranks must first call theirs in the same order, as for :meth:`gradient_reducer`.

        Args:
            num_buckets: number of buckets, at most one for each tensor (default: small ones together).
        """

    def exchange_rows(self, rows: tf.Tensor, name: str) -> tf.Tensor:
        """Sends row i of a matrix ``[size, n]`` to rank i; returns the rows from all ranks, in rank order.

        It works inside a tf.function. ``name`` identifies the call site.
        """

    def exchange_parts(self, tensor: tf.Tensor, lengths: tf.Tensor, name: str) -> tuple[tf.Tensor, tf.Tensor]:
        """Sends ``lengths[i]`` rows of a tensor to rank i, in order; returns the rows from all ranks, and how many each
        has sent.

        It works inside a tf.function, and has no gradient. ``name`` identifies the call site. The rows that one rank
        sends or receives must be less than 2 GiB together.
        """

    def all_true(self, value: tf.Tensor) -> tf.Tensor:
        """A scalar that is true if it is true on every rank; it works inside a tf.function."""

    def gather_samples(self, own: tf.Tensor, name: str) -> tf.Tensor:
        """Every rank's tensor, in rank order, concatenated along the first dimension, whose size may differ.

        It works inside a tf.function and has a gradient, the sum over ranks. ``name`` identifies the call site.
        """

    def gather_rows(self, row: tf.Tensor, name: str) -> tf.Tensor:
        """Every rank's vector, shape ``[n]``, as the rows of one matrix ``[size, n]``.

        It works inside a tf.function and has a gradient. ``name`` identifies the call site.
        """
