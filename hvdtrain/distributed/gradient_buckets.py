"""Gradient buckets: small gradients are reduced together. Reducing one takes as long as reducing a few hundred KiB."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from hvdtrain.system import devices

BUCKET_BYTES = 1 << 20
"""Size of a bucket. A gradient of at least this size has a separate bucket, unless the number of buckets is given."""


@dataclasses.dataclass(frozen=True)
class BucketLayout:
    """Which tensors share a bucket.

    Args:
        shapes: the shapes of the tensors.
        members: for each bucket, the positions of its tensors.
    """

    shapes: Sequence[tf.TensorShape]
    members: Sequence[Sequence[int]]

    def pack(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The buckets: a tensor as it is, or several concatenated in a vector."""
        return [
            tensors[members[0]]
            if len(members) == 1
            else tf.concat([tf.reshape(tensors[i], [-1]) for i in members], axis=0)
            for members in self.members
        ]

    def unpack(self, buckets: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The tensors, in the order and with the shapes of those that were packed.

        A scalar stands for each tensor of its bucket.
        """
        tensors: dict[int, tf.Tensor] = {}
        for members, bucket in zip(self.members, buckets, strict=True):
            if len(members) == 1 or bucket.shape.rank == 0:
                tensors |= dict.fromkeys(members, bucket)
                continue
            parts = tf.split(bucket, [self.shapes[i].num_elements() for i in members])
            for i, part in zip(members, parts, strict=True):
                tensors[i] = tf.reshape(part, self.shapes[i])
        return [tensors[i] for i in range(len(self.shapes))]


def bucket_layout(tensors: Sequence[tf.Tensor], count: int | None = None) -> BucketLayout:
    """Assigns gradients to buckets in the order in which a backward pass produces them: from last to first.

    Only tensors of one dtype share a bucket, and a tensor of unknown shape has a separate bucket.

    Args:
        count: number of buckets, or more if there are several dtypes; None: as few as possible for the small tensors,
            in buckets of at most ``BUCKET_BYTES``.
    """
    backwards = list(reversed(range(len(tensors))))
    if count is None:
        members = _small_ones_together(tensors, backwards)
    else:
        parts = np.array_split(backwards, count)
        members = [bucket for part in parts for bucket in _by_dtype(tensors, part.tolist())]
    return BucketLayout([each.shape for each in tensors], members)


def are_sent_together(num_ranks: int, num_local_ranks: int) -> bool:
    """Whether all buckets are sent when the last one is ready.

    With one core, nothing can be hidden behind the backward pass: a reduction meanwhile interrupts it.
    """
    return num_ranks == num_local_ranks and devices.computes_on_one_core()


def _small_ones_together(tensors: Sequence[tf.Tensor], order: Sequence[int]) -> list[list[int]]:
    buckets: list[list[int]] = []
    open_buckets: dict[tf.DType, tuple[list[int], int]] = {}
    for i in order:
        size = _bytes(tensors[i])
        if size is None or size >= BUCKET_BYTES:
            buckets.append([i])
            continue
        bucket, filled = open_buckets.get(tensors[i].dtype, ([], 0))
        if not bucket or filled + size > BUCKET_BYTES:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(i)
        open_buckets[tensors[i].dtype] = bucket, filled + size
    return buckets


def _by_dtype(tensors: Sequence[tf.Tensor], part: Sequence[int]) -> list[list[int]]:
    groups: dict[object, list[int]] = {}
    for i in part:
        groups.setdefault(i if _bytes(tensors[i]) is None else tensors[i].dtype, []).append(i)
    return list(groups.values())


def _bytes(tensor: tf.Tensor) -> int | None:
    count = tensor.shape.num_elements()
    return None if count is None else count * tensor.dtype.size
