"""The communicating stage of the pipeline: reduces the gradients of a step over all ranks."""

import dataclasses
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.compressed_reduction import CompressedReducer, make_reducer
from hvdtrain.distributed.compression import Compression
from hvdtrain.distributed.compression_memory import CompressionMemory
from hvdtrain.distributed.config import ReductionConfig
from hvdtrain.distributed.gradient_reduction import (
    Gradient,
    GradientReducer,
    ReducedGradients,
    divided,
    reduced_but_local,
    unreduced,
    with_shapes_of,
    without_left_out_samples,
)
from hvdtrain.distributed.sharded_reduction import ShardedReduction


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepReduction:
    """Reduces the gradients of a step to their mean, or sum, over the samples of all ranks."""

    config: ReductionConfig
    collectives: Collectives
    reducer: GradientReducer
    """Sends them."""
    compression: Compression | None = None
    local_variables: Callable[[], Sequence[keras.Variable]] = list
    """Returns the variables whose gradients are not reduced: each rank trains its own."""
    step_weight: Callable[[], tf.Tensor] | None = None
    """This rank's mean weight over the micro-batches of the step, less than 1 if samples were left out; None: 1."""
    is_done: bool = False
    """Whether the gradients were reduced before, and are equal on all ranks."""

    def __call__(self, variables: Sequence[keras.Variable], gradients: Sequence[Gradient]) -> ReducedGradients:
        gradients = with_shapes_of(variables, gradients)
        is_local = self.are_local(variables)
        if any(is_local):
            return reduced_but_local(self.reducer, gradients, is_local, self.share)
        if self.step_weight is None:
            return self.reducer(gradients)
        weight = self.step_weight()
        if self.sharded is None:
            return without_left_out_samples(self.reducer([*gradients, weight]))
        # Every rank divides its parts by the weight of all ranks.
        (total,) = self.sharded.sum_over_ranks([weight], "weight")
        return divided(self.reducer(gradients), total * tf.cast(self.share, total.dtype))

    @property
    def sharded(self) -> ShardedReduction | None:
        """The reducer of a sharded optimizer; None if each rank updates all variables."""
        return self.reducer if isinstance(self.reducer, ShardedReduction) else None

    @property
    def memory(self) -> CompressionMemory | None:
        """The state that a compression keeps from step to step; None without compression."""
        return self.reducer.memory if isinstance(self.reducer, CompressedReducer) else None

    @property
    def share(self) -> float:
        """What a rank's own gradient is multiplied by to get the gradient of its samples within the whole batch."""
        return 1.0 if self.config.op == "sum" else 1 / self.collectives.size

    def are_local(self, variables: Sequence[keras.Variable]) -> list[bool]:
        """Which of the variables each rank trains alone."""
        local = {id(variable) for variable in self.local_variables()}
        return [id(variable) in local for variable in variables]

    def over(self, collectives: Collectives) -> "StepReduction":
        """The reduction over other ranks; errors of a compression are carried over."""
        if self.sharded is not None:
            raise AssertionError("each rank has a part of the state")
        reducer = make_reducer(collectives, self.config, self.compression, memory=self.memory)
        return dataclasses.replace(self, collectives=collectives, reducer=reducer)


def already_reduced(reduction: StepReduction) -> StepReduction:
    """The reduction of gradients that are equal on all ranks: it sends nothing."""
    return dataclasses.replace(reduction, reducer=unreduced, local_variables=list, step_weight=None, is_done=True)
