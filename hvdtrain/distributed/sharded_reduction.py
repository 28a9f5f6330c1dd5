"""Reduces gradients so that each rank receives its part of the result, and collects the parts of all ranks."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from hvdtrain.distributed.bounded_messages import piece_bounds
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.config import ReductionConfig
from hvdtrain.distributed.gradient_buckets import are_sent_together, bucket_layout
from hvdtrain.distributed.gradient_reduction import Gradient, ReducedGradients, StepSum
from hvdtrain.distributed.shards import rows_of_parts, whole_of_rows
from hvdtrain.errors import UsageError

_numbers = itertools.count(1)


class _Layout(NamedTuple):
    """Which parts share a bucket."""

    lengths: Sequence[int]
    """Those of the parts."""
    members: Sequence[Sequence[int]]
    """For each bucket, the positions of its parts."""

    def pack(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The buckets: vectors, or matrices whose rows are parts, concatenated."""
        return [
            parts[members[0]] if len(members) == 1 else tf.concat([parts[i] for i in members], axis=-1)
            for members in self.members
        ]

    def unpack(self, buckets: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The parts, or matrices, that were packed."""
        found: dict[int, tf.Tensor] = {}
        for members, bucket in zip(self.members, buckets, strict=True):
            several = len(members) > 1
            parts = tf.split(bucket, [self.lengths[i] for i in members], axis=-1) if several else [bucket]
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
        self._sums: dict[str, StepSum] = {}
        self._name = ""

    def __call__(self, gradients: Sequence[Gradient]) -> ReducedGradients:
        """Reduces gradients; the result holds this rank's parts, as vectors."""
        size = self.collectives.size
        tensors = [tf.convert_to_tensor(each) for each in gradients]
        rows, shapes = [rows_of_parts(each, size) for each in tensors], [each.shape for each in tensors]
        groups = self._config.groups
        if groups is not None and groups > len(rows):
            raise UsageError(f"groups must be at most the number of gradients. Received: {groups} for {len(rows)}")
        layout = _layout(rows, groups)
        packed = layout.pack(rows)
        with tf.control_dependencies(packed if are_sent_together(size, self.collectives.local_size) else []):
            buckets = [self._reduce(each, f"{self._named()}_scatter_{i}") for i, each in enumerate(packed)]
        return ReducedGradients(
            packed,
            buckets,
            layout.unpack,
            sum_over_ranks=lambda tensors: self.sum_over_ranks(tensors, "norm"),
            gather=lambda parts: self.gather(parts, shapes, "gradient"),
        )

    def sum_over_ranks(self, tensors: Sequence[tf.Tensor], place: str) -> list[tf.Tensor]:
        """Adds up small tensors that each rank computes from its parts; ``place`` identifies the call site."""
        if place not in self._sums:
            self._sums[place] = self.collectives.step_sum()
        return self._sums[place](tensors)

    def gather(self, parts: Sequence[tf.Tensor], shapes: Sequence[Sequence[int]], place: str) -> list[tf.Tensor]:
        """The whole tensors of these shapes, from each rank's parts; ``place`` identifies the call site."""
        layout = _layout(parts, None)
        rows = [self._gather(each, f"{self._named()}_{place}_{i}") for i, each in enumerate(layout.pack(parts))]
        return [whole_of_rows(each, shape) for each, shape in zip(layout.unpack(rows), shapes, strict=True)]

    def _named(self) -> str:
        self._name = self._name or f"hvdtrain_shards_{next(_numbers)}"
        return self._name

    def _reduce(self, rows: tf.Tensor, name: str) -> tf.Tensor:
        """This rank's row of the mean, or the sum, of all ranks' matrices."""
        half, size = rows.dtype in (tf.float16, tf.bfloat16), self.collectives.size
        sent = tf.cast(rows, tf.float32) if half else rows
        totals = []
        for start, end in piece_bounds(rows.shape[1], size * sent.dtype.size):
            piece = sent if end - start == rows.shape[1] else sent[:, start:end]
            totals.append(tf.add_n(tf.unstack(self.collectives.exchange_rows(piece, f"{name}_{start}"))))
        total = totals[0] if len(totals) == 1 else tf.concat(totals, axis=0)
        if self._config.op == "average":
            total /= tf.cast(size, total.dtype)
        return tf.cast(total, rows.dtype)

    def _gather(self, part: tf.Tensor, name: str) -> tf.Tensor:
        """Every rank's vector as the rows of a matrix."""
        bounds = piece_bounds(part.shape[0], self.collectives.size * part.dtype.size)
        pieces = [self.collectives.gather_rows(part[start:end], f"{name}_{start}") for start, end in bounds]
        return pieces[0] if len(pieces) == 1 else tf.concat(pieces, axis=1)


def _layout(tensors: Sequence[tf.Tensor], groups: int | None) -> _Layout:
    return _Layout([each.shape[-1] for each in tensors], bucket_layout(tensors, groups).members)
