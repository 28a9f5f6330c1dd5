"""Gradients put together into messages: to reduce a small one takes as long as to reduce a few hundred KiB."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

LARGE_BYTES = 1 << 20
"""A gradient of at least so many bytes is a message by itself, unless the number of messages is given."""


@dataclasses.dataclass(frozen=True)
class Packing:
    """Which tensors travel together, and how they are taken apart again.

    Args:
        shapes: of the tensors.
        members: of each message, the positions of its tensors.
    """

    shapes: Sequence[tf.TensorShape]
    members: Sequence[Sequence[int]]

    def pack(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The messages: a tensor by itself, or several in a vector."""
        return [
            tensors[members[0]]
            if len(members) == 1
            else tf.concat([tf.reshape(tensors[i], [-1]) for i in members], axis=0)
            for members in self.members
        ]

    def unpack(self, messages: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The tensors, in the order and the shapes of those that were packed."""
        tensors: dict[int, tf.Tensor] = {}
        for members, message in zip(self.members, messages, strict=True):
            if len(members) == 1:
                tensors[members[0]] = message
                continue
            parts = tf.split(message, [self.shapes[i].num_elements() for i in members])
            for i, part in zip(members, parts, strict=True):
                tensors[i] = tf.reshape(part, self.shapes[i])
        return [tensors[i] for i in range(len(self.shapes))]


def packing_of(tensors: Sequence[tf.Tensor], count: int | None = None) -> Packing:
    """Puts gradients together in the order in which a backward pass makes them: from the last to the first.

    Only tensors of one dtype travel together, and one whose shape is not known travels alone.

    Args:
        count: so many messages, or more where there are several dtypes; None: as few as hold small tensors up to
            ``LARGE_BYTES`` each.
    """
    backwards = list(reversed(range(len(tensors))))
    if count is None:
        members = _small_ones_together(tensors, backwards)
    else:
        parts = np.array_split(backwards, count)
        members = [message for part in parts for message in _of_one_kind(tensors, part.tolist())]
    return Packing([each.shape for each in tensors], members)


def _small_ones_together(tensors: Sequence[tf.Tensor], order: Sequence[int]) -> list[list[int]]:
    messages: list[list[int]] = []
    under_way: dict[tf.DType, tuple[list[int], int]] = {}
    for i in order:
        size = _bytes(tensors[i])
        if size is None or size >= LARGE_BYTES:
            messages.append([i])
            continue
        message, filled = under_way.get(tensors[i].dtype, ([], 0))
        if not message or filled + size > LARGE_BYTES:
            message, filled = [], 0
            messages.append(message)
        message.append(i)
        under_way[tensors[i].dtype] = message, filled + size
    return messages


def _of_one_kind(tensors: Sequence[tf.Tensor], part: Sequence[int]) -> list[list[int]]:
    kinds: dict[object, list[int]] = {}
    for i in part:
        kinds.setdefault(i if _bytes(tensors[i]) is None else tensors[i].dtype, []).append(i)
    return list(kinds.values())


def _bytes(tensor: tf.Tensor) -> int | None:
    count = tensor.shape.num_elements()
    return None if count is None else count * tensor.dtype.size
