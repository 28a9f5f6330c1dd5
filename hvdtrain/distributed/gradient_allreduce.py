"""Reduces the gradients of a step over Horovod: dense ones in buckets, sparse ones by gathering their rows."""

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.distributed import bounded_messages
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.config import ReductionConfig
from hvdtrain.distributed.gradient_buckets import are_sent_together, bucket_layout
from hvdtrain.distributed.gradient_reduction import (
    Gradient,
    GradientReducer,
    ReducedGradients,
    StepSum,
    is_sparse,
    most_rows,
    sum_of_elements,
    with_unique_rows,
    with_values,
)
from hvdtrain.distributed.horovod_operations import HorovodOperations
from hvdtrain.errors import UsageError


class GradientAllreduce:
    """Makes functions that reduce gradients; they work inside a tf.function.

    Args:
        ranks: those that take part.
    """

    def __init__(self, operations: HorovodOperations, ranks: Collectives):
        self._operations = operations
        self._ranks = ranks

    def reducer(self, config: ReductionConfig) -> GradientReducer:
        """The mean or the sum of gradients; see :meth:`~hvdtrain.distributed.collectives.Collectives`."""
        averages, name = config.op == "average", ""
        reduce_op = self._operations.hvd.Average if averages else self._operations.hvd.Sum

        def reduce(gradients: Sequence[Gradient]) -> ReducedGradients:
            nonlocal name
            name = name or self._operations.next_reduction_name()
            sparse = [] if config.sparse_as_dense else [i for i, each in enumerate(gradients) if is_sparse(each)]
            dense = [i for i in range(len(gradients)) if i not in sparse]
            if config.groups is not None and config.groups > len(dense):
                raise UsageError(
                    f"groups must be at most the number of dense gradients. Received: {config.groups} for {len(dense)}"
                )
            tensors = [tf.convert_to_tensor(gradients[i]) for i in dense]
            layout = bucket_layout(tensors, config.groups)
            packed = layout.pack(tensors)
            sums = {i: sum_of_elements(each) for i, each in enumerate(packed) if bounded_messages.is_large(each)}
            buckets = self._reduce_buckets(packed, reduce_op, name, sums)
            gathered = [self._gather_slices(gradients[i], averages, f"{name}_rows_{i}") for i in sparse]

            def unpack(buckets: Sequence[tf.Tensor]) -> list[Gradient]:
                found = dict(zip(dense, layout.unpack(buckets[: len(packed)]), strict=True))
                values = buckets[len(packed) :]
                found |= {i: with_values(all_, each) for i, all_, each in zip(sparse, gathered, values, strict=True)}
                return [found[i] for i in range(len(gradients))]

            sent = [*packed, *(gradients[i].values for i in sparse)]
            return ReducedGradients(sent, [*buckets, *(each.values for each in gathered)], unpack, sums=sums)

        return reduce

    def step_sum(self, num_buckets: int | None) -> StepSum:
        """The sum of tensors; see :meth:`~hvdtrain.distributed.collectives.Collectives.step_sum`."""
        name, reduce_op = "", self._operations.hvd.Sum

        def total(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            nonlocal name
            name = name or self._operations.next_reduction_name()
            layout = bucket_layout(tensors, num_buckets and min(num_buckets, len(tensors)))
            return layout.unpack(self._reduce_buckets(layout.pack(tensors), reduce_op, name, {}, in_half=True))

        return total

    def _reduce_buckets(
        self, packed: Sequence[tf.Tensor], op: Any, name: str, sums: Mapping[int, tf.Tensor], **options: bool
    ) -> list[tf.Tensor]:
        reduced: list[tf.Tensor] = []
        last: list[tf.Tensor] = []
        with tf.control_dependencies(packed if are_sent_together(self._ranks.size, self._ranks.local_size) else []):
            # Each result takes memory from when its reduction is begun; what was sent is free when it has ended.
            for group in bounded_messages.groups_of_bounded_size(packed):
                first = [sums[i] for i in group if i in sums]
                with tf.control_dependencies([*first, *map(bounded_messages.arrival, last)]):
                    last = [self._operations.allreduce(packed[i], op, f"{name}_{i}", **options) for i in group]
                reduced += last
        return reduced

    def _gather_slices(self, own: tf.IndexedSlices, averages: bool, name: str) -> tf.IndexedSlices:
        """The mean or the sum over ranks of a sparse gradient; each row once."""
        own = with_unique_rows(own)  # fewer rows to send
        sent = tf.cast(own.values, tf.float32) if own.values.dtype == tf.bfloat16 else own.values

        def gather(columns: tf.Tensor, suffix: str) -> tf.Tensor:
            return self._operations.allgather(columns, f"{name}_values{suffix}")

        values = bounded_messages.in_columns(sent, self._ranks.size * most_rows(own), gather)
        rows = self._operations.allgather(own.indices, f"{name}_indices")
        num_ranks = self._ranks.num_ranks() if averages else 1
        values = tf.cast(values, own.values.dtype) / tf.cast(num_ranks, own.values.dtype)
        return with_unique_rows(tf.IndexedSlices(values, rows, own.dense_shape))
