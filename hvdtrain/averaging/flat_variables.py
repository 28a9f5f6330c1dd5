"""Variables side by side in a few flat tensors, which travel as few large messages."""

from collections.abc import Sequence

import keras
import tensorflow as tf

_BUCKET_BYTES = 32 << 20


class FlatVariables:
    """Reads and writes variables as flat tensors of up to 32 MB, float64 apart from the others.

    Half precision travels as float32, so that adding up loses nothing.
    """

    def __init__(self, variables: Sequence[keras.Variable]):
        self._buckets: list[tuple[tf.DType, list[keras.Variable]]] = []
        for wire in (tf.float32, tf.float64):
            members = [v for v in variables if (tf.as_dtype(v.dtype) == tf.float64) == (wire == tf.float64)]
            bucket: list[keras.Variable] = []
            for variable in members:
                if bucket and _bytes([*bucket, variable], wire) > _BUCKET_BYTES:
                    self._buckets.append((wire, bucket))
                    bucket = []
                bucket.append(variable)
            if bucket:
                self._buckets.append((wire, bucket))
        self.read = tf.function(self._read)
        """The values, copied."""
        self.assign = tf.function(self._assign)
        """Overwrites the variables."""

    @property
    def num_bytes(self) -> int:
        """Of all flat tensors."""
        return sum(_bytes(variables, wire) for wire, variables in self._buckets)

    @property
    def num_tensors(self) -> int:
        return len(self._buckets)

    def _read(self) -> list[tf.Tensor]:
        return [
            tf.concat([tf.reshape(tf.cast(variable.value, wire), [-1]) for variable in variables], 0)
            for wire, variables in self._buckets
        ]

    def _assign(self, flats: Sequence[tf.Tensor]) -> None:
        for (_, variables), flat in zip(self._buckets, flats, strict=True):
            sizes = [variable.value.shape.num_elements() for variable in variables]
            for variable, part in zip(variables, tf.split(flat, sizes), strict=True):
                variable.assign(tf.cast(tf.reshape(part, variable.shape), variable.dtype))


def _bytes(variables: Sequence[keras.Variable], wire: tf.DType) -> int:
    return sum(variable.value.shape.num_elements() for variable in variables) * wire.size
