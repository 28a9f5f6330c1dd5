"""Gradients sent in half precision."""

import dataclasses
from collections.abc import Mapping, Sequence

import tensorflow as tf

from hvdtrain.distributed.compression import Compressed, Compression, Ranks

_LIMIT = float(1 << 15)
"""Half of the largest float16: the sum over ranks of values below _LIMIT / ranks cannot overflow."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FP16(Compression):
    """Sends gradients in half precision: half the bytes.

    A rank sends ``x / ranks``, limited to ``2**15 / ranks``, so that the sum over ranks, which is the mean, cannot
    overflow. What rounding, underflow and the limit remove is added to the next step's gradient.
    """

    def num_bytes(self, gradient: tf.TensorSpec) -> int | None:
        """Two bytes for each element; see :meth:`Compression.num_bytes`."""
        # A scalar may be a weight, and saves nothing.
        is_worthwhile = gradient.dtype in (tf.float32, tf.float64) and gradient.shape.rank != 0
        return 2 * gradient.shape.num_elements() if is_worthwhile else None

    def reduce(self, gradients: Sequence[tf.Tensor], state: Mapping[str, tf.Tensor], ranks: Ranks) -> Compressed:
        """See :meth:`Compression.reduce`."""
        halves = [tf.cast(_limited(each) / tf.cast(ranks.count, each.dtype), tf.float16) for each in gradients]
        totals = ranks.sum(halves)
        means = [tf.cast(total, each.dtype) for total, each in zip(totals, gradients, strict=True)]
        own = [
            tf.cast(half, each.dtype) * tf.cast(ranks.count, each.dtype)
            for half, each in zip(halves, gradients, strict=True)
        ]
        return Compressed(means, own, {})


def _limited(gradient: tf.Tensor) -> tf.Tensor:
    """Limits finite values to the range in which half precision cannot overflow."""
    limited = tf.clip_by_value(gradient, -_LIMIT, _LIMIT)
    return tf.where(tf.math.is_finite(gradient), limited, gradient)
