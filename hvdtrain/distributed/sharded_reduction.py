"""Reduces gradients so that each rank receives its part of the result, and collects the parts of all ranks."""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.config import ReductionConfig
from hvdtrain.distributed.gradient_buckets import are_sent_together, bucket_layout
from hvdtrain.distributed.gradient_reduction import Gradient, ReducedGradients
from hvdtrain.distributed.shards import num_pieces, part_length, rows_of_parts, whole_of_rows
from hvdtrain.distributed.step_sums import StepSums
from hvdtrain.errors import UsageError

_numbers = itertools.count(1)


class _Layout(NamedTuple):
    """Which vectors share a bucket."""

    lengths: Sequence[int]
    """The lengths of the vectors."""
    members: Sequence[Sequence[int]]
    """For each bucket, the positions of its vectors."""

    def pack(self, vectors: Sequence[tf.Tensor], join: Callable[[Sequence[tf.Tensor]], tf.Tensor]) -> list[tf.Tensor]:
        """The buckets: a tensor as it is, or several joined in a vector, or in a matrix whose rows are vectors."""
        groups = [[vectors[i] for i in members] for members in self.members]
        return [group[0] if len(group) == 1 else join(group) for group in groups]

    def unpack(self, buckets: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """What was packed; a scalar stands for each vector of its bucket."""
        found: dict[int, tf.Tensor] = {}
        for members, bucket in zip(self.members, buckets, strict=True):
            if len(members) == 1 or bucket.shape.rank == 0:
                found |= dict.fromkeys(members, bucket)
                continue
            parts = tf.split(bucket, [self.lengths[i] for i in members], axis=-1)
            found |= dict(zip(members, parts, strict=True))
        return [found[i] for i in range(len(self.lengths))]


class ShardedReduction:
    """A reduce-scatter of gradients, and an all-gather of what each rank computes from its parts of them.

    Together they send as many bytes as a ring allreduce. Each rank adds up its part in the order of ranks, so that
    sums are the same in every run. Sparse gradients are reduced as dense ones. Everything works inside a tf.function.
    Ranks must first call theirs in the same order, which names the messages.
    """

    def __init__(self, collectives: Collectives, config: ReductionConfig):
        self.collectives = collectives
        self._config = config
        self.sum_over_ranks = StepSums(collectives)
        """Adds up small tensors that each rank computes from its parts."""
        self._name = ""

    def __call__(self, gradients: Sequence[Gradient]) -> ReducedGradients:
        """Reduces gradients; the result holds this rank's parts, as vectors."""
        size, groups = self.collectives.size, self._config.groups
        tensors = [tf.convert_to_tensor(each) for each in gradients]
        if groups is not None and groups > len(tensors):
            raise UsageError(f"groups must be at most the number of gradients. Received: {groups} for {len(tensors)}")
        shapes = [each.shape for each in tensors]
        lengths = [part_length(shape.num_elements(), size) for shape in shapes]
        layout = _Layout(lengths, bucket_layout(tensors, groups).members)
        packed = layout.pack(tensors, lambda group: tf.concat([rows_of_parts(each, size) for each in group], axis=1))
        waits_for = packed if are_sent_together(size, self.collectives.local_size) else []
        buckets: list[tf.Tensor] = []
        for i, (bucket, members) in enumerate(zip(packed, layout.members, strict=True)):
            length, name = sum(lengths[j] for j in members), f"{self._named()}_scatter_{i}"
            with tf.control_dependencies([*waits_for, *buckets[-1:]]):
                buckets.append(self._reduce(bucket, length, len(members) > 1, name))
        return ReducedGradients(
            packed,
            buckets,
            layout.unpack,
            parts=range(len(packed)),
            sum_over_ranks=lambda tensors: self.sum_over_ranks(tensors, "norm"),
            gather=lambda parts: self.gather(parts, shapes, "gradient"),
        )

    def gather(self, parts: Sequence[tf.Tensor], shapes: Sequence[Sequence[int]], place: str) -> list[tf.Tensor]:
        """The whole tensors of these shapes, from each rank's parts; ``place`` identifies the call site."""
        layout = _Layout([each.shape[0] for each in parts], bucket_layout(parts).members)
        packed = layout.pack(parts, lambda group: tf.concat(group, axis=0))
        rows: list[tf.Tensor] = []
        for i, each in enumerate(packed):
            with tf.control_dependencies(rows[-1:]):
                rows.append(self._gather(each, f"{self._named()}_{place}_{i}"))
        return [whole_of_rows(each, shape) for each, shape in zip(layout.unpack(rows), shapes, strict=True)]

    def _named(self) -> str:
        self._name = self._name or f"hvdtrain_shards_{next(_numbers)}"
        return self._name

    def _reduce(self, bucket: tf.Tensor, length: int, is_matrix: bool, name: str) -> tf.Tensor:
        """This rank's part of the mean, or the sum, of all ranks' buckets: whole tensors, or matrices of parts."""
        size, half = self.collectives.size, bucket.dtype in (tf.float16, tf.bfloat16)
        wide = tf.float32 if half else bucket.dtype

        def reduce(start: int, end: int) -> tf.Tensor:
            rows = bucket[:, start:end] if is_matrix else rows_of_parts(bucket, size, start, end)
            received = self.collectives.exchange_rows(tf.cast(rows, wide), f"{name}_{start}")
            total = tf.add_n(tf.unstack(received))
            if self._config.op == "average":
                total /= tf.cast(size, wide)
            return tf.cast(total, bucket.dtype)[tf.newaxis]

        return tf.reshape(_in_pieces(reduce, 1, length, num_pieces(size * length), bucket.dtype), [-1])

    def _gather(self, part: tf.Tensor, name: str) -> tf.Tensor:
        """Every rank's vector as the rows of a matrix."""
        size, length = self.collectives.size, part.shape[0]

        def gather(start: int, end: int) -> tf.Tensor:
            return self.collectives.gather_rows(part[start:end], f"{name}_{start}")

        return _in_pieces(gather, size, length, num_pieces(size * length), part.dtype)


def _in_pieces(
    receive: Callable[[int, int], tf.Tensor], num_rows: int, length: int, count: int, dtype: tf.DType
) -> tf.Tensor:
    """Receives a matrix in blocks of columns, each of which is written to its place."""
    step = -(-length // count)
    starts = range(0, length, step)
    if len(starts) == 1:
        return receive(0, length)
    matrix = tf.raw_ops.Empty(shape=[num_rows * len(starts), step], dtype=dtype)
    for i, start in enumerate(starts):
        with tf.control_dependencies([matrix]):
            piece = receive(start, min(start + step, length))
        if (missing := step - piece.shape[1]) > 0:
            piece = tf.pad(piece, [[0, 0], [0, missing]])
        matrix = tf.raw_ops.InplaceUpdate(x=matrix, i=[row * len(starts) + i for row in range(num_rows)], v=piece)
    rows = tf.reshape(matrix, [num_rows, len(starts) * step])
    return rows if rows.shape[1] == length else rows[:, :length]
