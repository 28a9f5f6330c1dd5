"""The collectives of a single process, without Horovod: every operation is the identity."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.config.exclusions import Condition
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.config import ReductionConfig
from hvdtrain.distributed.gradient_reduction import GradientReducer, StepSum, single_rank_reducer


class SingleProcessCollectives:
    """The collectives of a single process, or of a rank that trains independently of the others.

    Args:
        rank: the rank that messages name.
    """

    rank = 0
    size = 1
    local_rank = 0
    local_size = 1
    cross_rank = 0
    cross_size = 1
    may_change = False
    conditions: Sequence[Condition] = ()

    def __init__(self, rank: int = 0):
        self.rank = rank

    @property
    def reduces(self) -> bool:
        return self.size > 1

    def num_ranks(self) -> int:
        return self.size

    def sum(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [np.array(array) for array in arrays]

    def sum_tensors(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        return list(tensors)

    def sum_on_this_thread(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return list(tensors)

    def mpi_sum(self, array: np.ndarray) -> np.ndarray | None:
        return None

    def host_collectives(self) -> Collectives:
        return self

    def split(self, groups: Sequence[Sequence[int]]) -> Collectives:
        return self

    def broadcast(self, variables: Sequence[tf.Variable], root_rank: int = 0) -> None:
        pass

    def allgather(self, value: Any) -> list[Any]:
        return [value]

    def alltoall(self, pieces: Sequence[np.ndarray]) -> list[np.ndarray]:
        return list(pieces)

    def barrier(self) -> None:
        pass

    def gradient_reducer(self, config: ReductionConfig) -> GradientReducer:
        return single_rank_reducer(config)

    def step_sum(self, num_buckets: int | None = None) -> StepSum:
        return list

    def exchange_rows(self, rows: tf.Tensor, name: str) -> tf.Tensor:
        return rows

    def exchange_parts(self, tensor: tf.Tensor, lengths: tf.Tensor, name: str) -> tuple[tf.Tensor, tf.Tensor]:
        return tensor, lengths

    def all_true(self, value: tf.Tensor) -> tf.Tensor:
        return value

    def gather_samples(self, own: tf.Tensor, name: str) -> tf.Tensor:
        return own

    def gather_rows(self, row: tf.Tensor, name: str) -> tf.Tensor:
        return row[tf.newaxis]
