"""Sums over ranks, sent with 8 or 4 bits per element."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.compiled import compiled

_BLOCK = 256
"""Elements that share a scale."""


class Sums(NamedTuple):
    """The outcome of a quantized sum."""

    totals: Sequence[tf.Tensor]
    """Approximations of the sums, equal on all ranks."""
    lost: Sequence[tf.Tensor]
    """This rank's part of the difference: over all ranks, these add up to the exact sums minus the totals."""


class QuantizedSum:
    """Sums vectors over ranks: each rank adds up a segment of all ranks' vectors and sends its sum to all.

    As many elements are sent as in a ring allreduce, each as an integer of a few bits, rounded to multiples of the
    largest magnitude among 256 neighbours, divided by 127 or 7. Values are added in single precision.

    Args:
        bits: 8 or 4.
    """

    def __init__(self, collectives: Collectives, bits: int):
        self._collectives = collectives
        self._bits = bits
        self._compiled: dict[tuple[str, int, int], Callable[..., Any]] = {}

    def num_bytes(self, num_elements: int) -> int:
        """The bytes of a vector."""
        return self._collectives.size * self._row_bytes(self._segment(num_elements))

    def sum(self, vectors: Sequence[tf.Tensor], name: str) -> Sums:
        """Sums vectors, shape ``[n]``; all ranks must call it, one call of a name at a time."""
        place = (name, self._collectives.rank, self._collectives.size)
        if place not in self._compiled:
            self._compiled[place] = compiled(
                lambda vectors: [self._sum(each, f"{name}_{i}") for i, each in enumerate(vectors)]
            )
        found = self._compiled[place](list(vectors))
        return Sums([total for total, _ in found], [lost for _, lost in found])

    def _sum(self, vector: tf.Tensor, name: str) -> tuple[tf.Tensor, tf.Tensor]:
        rank, size, num_elements = self._collectives.rank, self._collectives.size, vector.shape[0]
        segment = self._segment(num_elements)
        padded = tf.pad(tf.cast(vector, tf.float32), [[0, size * segment - num_elements]])
        sent = self._pack(tf.reshape(padded, [size, segment]))
        received = self._collectives.exchange_rows(sent, f"{name}_parts")
        exact = tf.reduce_sum(self._unpack(received, segment), axis=0)
        total = self._pack(exact[tf.newaxis])
        totals = self._unpack(self._collectives.gather_rows(total[0], f"{name}_totals"), segment)
        lost = tf.reshape(padded, [size, segment]) - self._unpack(sent, segment)
        lost = tf.tensor_scatter_nd_add(lost, [[rank]], exact[tf.newaxis] - self._unpack(total, segment))
        return tuple(tf.cast(tf.reshape(each, [-1])[:num_elements], vector.dtype) for each in (totals, lost))

    def _segment(self, num_elements: int) -> int:
        return _BLOCK * math.ceil(num_elements / (_BLOCK * self._collectives.size))

    def _row_bytes(self, segment: int) -> int:
        return segment * self._bits // 8 + 4 * segment // _BLOCK

    def _pack(self, rows: tf.Tensor) -> tf.Tensor:
        """Rows of floats as rows of bytes: the integers, then the scales."""
        count, largest = rows.shape[0], 2 ** (self._bits - 1) - 1
        blocks = tf.reshape(rows, [count, -1, _BLOCK])
        # A non-finite value yields a non-finite scale, and so a non-finite block on every rank.
        scales = tf.reduce_max(tf.abs(blocks), axis=2) / largest
        integers = tf.round(tf.math.divide_no_nan(blocks, scales[..., tf.newaxis])) + (largest + 1)
        codes = tf.reshape(tf.cast(integers, tf.uint8), [count, -1])
        if self._bits == 4:
            codes = codes[:, ::2] * 16 + codes[:, 1::2]
        return tf.concat([codes, tf.reshape(tf.bitcast(scales, tf.uint8), [count, -1])], axis=1)

    def _unpack(self, rows: tf.Tensor, segment: int) -> tf.Tensor:
        largest = 2 ** (self._bits - 1) - 1
        codes, scales = tf.split(rows, [segment * self._bits // 8, -1], axis=1)
        if self._bits == 4:
            codes = tf.stack([codes // 16, codes % 16], axis=2)
        # Not the number of rows, which may change without another trace.
        integers = tf.reshape(tf.cast(codes, tf.float32), [-1, segment // _BLOCK, _BLOCK]) - (largest + 1)
        scales = tf.bitcast(tf.reshape(scales, [-1, segment // _BLOCK, 4]), tf.float32)
        return tf.reshape(integers * scales[..., tf.newaxis], [-1, segment])
