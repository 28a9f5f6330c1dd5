"""The communicating stage of the pipeline: reduces the gradients of a step over all ranks."""

import dataclasses
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from hvdtrain.distributed.bounded_messages import num_bytes
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.compressed_reduction import CompressedReducer, make_reducer
from hvdtrain.distributed.compression import Compression
from hvdtrain.distributed.compression_memory import CompressionMemory
from hvdtrain.distributed.config import ReductionConfig
from hvdtrain.distributed.gradient_buckets import BUCKET_BYTES
from hvdtrain.distributed.gradient_reduction import (
    Gradient,
    GradientReducer,
    ReducedGradients,
    divided,
    reduced_but_local,
    unreduced,
    values_of,
    with_parts,
    with_shapes_of,
    with_unique_rows,
    with_values,
    without_left_out_samples,
)
from hvdtrain.distributed.row_shards import RowShard
from hvdtrain.distributed.sharded_reduction import ShardedReduction
from hvdtrain.distributed.shards import row_shard_of
from hvdtrain.distributed.step_sums import StepSums


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
    sums: StepSums
    """Adds up what each rank computes from its rows of sharded tables."""
    step_weight: Callable[[], tf.Tensor] | None = None
    """This rank's mean weight over the micro-batches of the step, less than 1 if samples were left out; None: 1."""
    is_done: bool = False
    """Whether the gradients were reduced before, and are equal on all ranks."""

    def __call__(self, variables: Sequence[keras.Variable], gradients: Sequence[Gradient]) -> ReducedGradients:
        gradients = with_shapes_of(variables, gradients)
        shards = {i: shard for i, each in enumerate(variables) if (shard := row_shard_of(each)) is not None}
        if not shards:
            return self._reduced(variables, gradients)[0]
        shared = [i for i in range(len(variables)) if i not in shards]
        others = _after_tables([gradients[i] for i in shared], [gradients[i] for i in shards])
        reduced, weight = self._reduced([variables[i] for i in shared], others)
        tables = {i: self._of_table(gradients[i], shard, weight) for i, shard in shards.items()}
        return with_parts(reduced, tables, lambda tensors: self.sums(tensors, "norm"))

    def _of_table(self, gradient: Gradient, shard: RowShard, weight: tf.Tensor | None) -> Gradient:
        """The gradient of this rank's rows, which is a sum over ranks, as a mean over their samples.

        Args:
            weight: the mean weight of the samples of all ranks; None: 1.
        """
        if self.is_done:
            return gradient
        gradient = with_unique_rows(gradient)
        # One process that is compared with these ranks is simulated by each of them.
        values = values_of(gradient) * tf.constant(self.share * self.collectives.size / shard.num_ranks, gradient.dtype)
        if weight is not None:
            values *= tf.cast(tf.math.divide_no_nan(1.0, weight), gradient.dtype)
        return with_values(gradient, values)

    def _reduced(
        self, variables: Sequence[keras.Variable], gradients: Sequence[Gradient]
    ) -> tuple[ReducedGradients, tf.Tensor | None]:
        """Reduces gradients; returns with them the mean weight of the samples of all ranks, None if it is 1."""
        is_local = self.are_local(variables)
        if any(is_local):
            return reduced_but_local(self.reducer, gradients, is_local, self.share), None
        if self.step_weight is None:
            return self.reducer(gradients) if gradients else unreduced([]), None
        weight = self.step_weight()
        if self.sharded is None:
            reduced = self.reducer([*gradients, weight])
            return without_left_out_samples(reduced), tf.convert_to_tensor(reduced.gradients[-1])
        # Every rank divides its parts by the weight of all ranks.
        (total,) = self.sharded.sum_over_ranks([weight], "weight")
        mean = total * tf.cast(self.share, total.dtype)
        return divided(self.reducer(gradients), mean), mean

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
        return dataclasses.replace(self, collectives=collectives, reducer=reducer, sums=StepSums(collectives))


def _after_tables(gradients: Sequence[Gradient], tables: Sequence[Gradient]) -> list[Gradient]:
    """Small gradients are sent when those of tables have arrived: Horovod sends one message after the other, and theirs
    costs no time while rows are added up."""
    if sum(num_bytes(values_of(each)) for each in gradients) > BUCKET_BYTES:
        return list(gradients)
    with tf.control_dependencies([values_of(each) for each in tables]):
        return [with_values(each, tf.identity(values_of(each))) for each in gradients]


def already_reduced(reduction: StepReduction) -> StepReduction:
    """The reduction of gradients that are equal on all ranks: it sends nothing."""
    return dataclasses.replace(reduction, reducer=unreduced, local_variables=list, step_weight=None, is_done=True)
