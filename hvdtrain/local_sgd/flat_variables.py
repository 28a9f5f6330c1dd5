"""Variables packed into a few flat tensors, so that averaging sends few large messages."""

from collections.abc import Iterable, Sequence

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.distributed.compiled import compiled

BUCKET_BYTES = 32 << 20
"""The most bytes of one flat tensor, unless a single variable is larger."""


class FlatVariables:
    """Reads and writes variables as flat tensors of up to 32 MiB; float64 variables get separate tensors.

    Half-precision variables are sent as float32, so that summation loses no precision.
    """

    def __init__(self, *groups: Sequence[keras.Variable]):
        self._buckets: list[tuple[tf.DType, list[keras.Variable]]] = []
        self.ends: list[int] = []
        """The number of tensors up to the end of each group; no tensor holds variables of two groups."""
        for variables in groups:
            for wire in (tf.float32, tf.float64):
                members = [variable for variable in variables if _wire(variable) == wire]
                self._add(members, wire)
            self.ends.append(len(self._buckets))
        self.read = compiled(self._read)
        """Returns a copy of the values."""
        self.assign = compiled(self._assign)
        """Overwrites the variables."""

    def _add(self, variables: Sequence[keras.Variable], wire: tf.DType) -> None:
        bucket: list[keras.Variable] = []
        for variable in variables:
            if bucket and num_bytes([*bucket, variable]) > BUCKET_BYTES:
                self._buckets.append((wire, bucket))
                bucket = []
            bucket.append(variable)
        if bucket:
            self._buckets.append((wire, bucket))

    def read_one(self, i: int) -> tf.Tensor:
        """Returns a copy of the values of one tensor."""
        wire, variables = self._buckets[i]
        return tf.concat([tf.reshape(tf.cast(variable.value, wire), [-1]) for variable in variables], 0)

    def assign_one(self, i: int, flat: tf.Tensor) -> None:
        """Overwrites the variables of one tensor."""
        _, variables = self._buckets[i]
        sizes = [variable.value.shape.num_elements() for variable in variables]
        for variable, part in zip(variables, tf.split(flat, sizes), strict=True):
            variable.assign(tf.cast(tf.reshape(part, variable.shape), variable.dtype))

    def _read(self) -> list[tf.Tensor]:
        return [self.read_one(i) for i in range(len(self._buckets))]

    def _assign(self, flats: Sequence[tf.Tensor]) -> None:
        for i, flat in enumerate(flats):
            self.assign_one(i, flat)


def arrays(tensors: Sequence[tf.Tensor]) -> list[np.ndarray]:
    """The values of flat tensors as read-only arrays, without copying them."""
    return [np.asarray(each) for each in tensors]  # each.numpy() copies


def num_bytes(variables: Iterable[keras.Variable]) -> int:
    """The bytes of flat tensors with these variables."""
    return sum(variable.value.shape.num_elements() * _wire(variable).size for variable in variables)


def _wire(variable: keras.Variable) -> tf.DType:
    return tf.float64 if tf.as_dtype(variable.dtype) == tf.float64 else tf.float32
