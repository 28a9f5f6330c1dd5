"""The part of each variable that a rank updates and keeps the optimizer's state for (ZeRO stage 1).

A variable is divided into one equal part for each rank, in the order of its elements, so that every rank has the same
share of each layer. They are padded with zeros to a multiple of 32 elements, at which TensorFlow can address a part of
a tensor without copying it; those that are sent in pieces, to a multiple of 32 for each piece.

Variables that are not equal on all ranks are marked here, by :func:`mark_part`: parts, and the rows of sharded tables
(:mod:`hvdtrain.distributed.row_shards`). Whatever treats variables as replicas asks :func:`whole_variables`.
"""

import dataclasses
import math
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.distributed.row_shards import RowShard

_MULTIPLE = 32
PIECE_ELEMENTS = 1 << 20
"""Elements of a tensor that are exchanged at a time, 4 MiB of single precision, so that pieces use the same memory.

The C library returns large buffers to the system after each use, and new memory is slow.
"""


@dataclasses.dataclass(frozen=True)
class Part:
    """One rank's part of a variable."""

    shape: tuple[int, ...]
    """The shape of the whole variable."""
    rank: int
    num_ranks: int

    @property
    def length(self) -> int:
        """Number of elements, padding included; the same on every rank."""
        return part_length(math.prod(self.shape), self.num_ranks)

    def of(self, whole: tf.Tensor) -> tf.Tensor:
        """This part of a tensor of the variable's shape, as a vector; where possible it shares the tensor's memory."""
        start, end = self.rank * self.length, (self.rank + 1) * self.length
        own = tf.reshape(whole, [-1])[start:end]
        missing = self.length - own.shape[0]
        return tf.pad(own, [[0, missing]]) if missing else own


def part_length(num_elements: int, num_ranks: int) -> int:
    """The length of each rank's part of a variable: a multiple of 32, and of the number of pieces it is sent in."""
    multiple = _MULTIPLE * num_pieces(num_elements)
    return multiple * -(-num_elements // (multiple * num_ranks))


def num_pieces(num_elements: int) -> int:
    """The number of pieces in which a tensor is exchanged."""
    return max(1, -(-num_elements // PIECE_ELEMENTS))


def rows_of_parts(whole: tf.Tensor, num_ranks: int, start: int = 0, end: int | None = None) -> tf.Tensor:
    """The parts of a tensor, of static shape, as the rows of a matrix, in the order of ranks.

    Args:
        start, end: the columns; others are not copied.
    """
    flat = tf.reshape(whole, [-1])
    length = part_length(flat.shape[0], num_ranks)
    end = length if end is None else end
    rows = [flat[rank * length + start : min(flat.shape[0], rank * length + end)] for rank in range(num_ranks)]
    missing = [end - start - row.shape[0] for row in rows]
    return tf.stack([tf.pad(row, [[0, num]]) if num else row for row, num in zip(rows, missing, strict=True)])


def whole_of_rows(rows: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
    """The tensor whose parts are the rows of a matrix."""
    flat, num_elements = tf.reshape(rows, [-1]), math.prod(shape)
    return tf.reshape(flat if flat.shape[0] == num_elements else flat[:num_elements], shape)


def whole_of_arrays(parts: Sequence[np.ndarray], shape: Sequence[int]) -> np.ndarray:
    """The array that consists of these parts, one from each rank.

    Raises:
        ValueError: they are not its parts.
    """
    num_elements = math.prod(shape)
    if len({part.shape for part in parts}) != 1 or parts[0].ndim != 1 or len(parts) * len(parts[0]) < num_elements:
        raise ValueError(f"shapes {[part.shape for part in parts]} are not those of the parts of shape {tuple(shape)}")
    return np.concatenate(parts)[:num_elements].reshape(shape)


def mark_part(variable: keras.Variable, part: Part | RowShard) -> None:
    """Records that a variable holds one rank's part of a whole one: of an optimizer's state, or rows of a table."""
    # Loops may pass TensorFlow's variable instead of Keras' to an optimizer or a tape.
    for each in (variable, variable.value):
        vars(each)["hvdtrain_part"] = part


def part_of(variable: keras.Variable | tf.Variable) -> Part | RowShard | None:
    """Which part of a whole variable this one holds; None if it is whole, and equal on all ranks."""
    part: Part | RowShard | None = getattr(variable, "hvdtrain_part", None)
    return part


def row_shard_of(variable: keras.Variable | tf.Variable) -> RowShard | None:
    """Which rows of a table that is sharded over ranks a variable holds; None if it is no such table, nor its state."""
    part = part_of(variable)
    return part if isinstance(part, RowShard) else None


def has_tables(model: keras.Model) -> bool:
    """Whether a model has tables that are sharded over several ranks."""
    return any(row_shard_of(variable) is not None for variable in model.weights)


def whole_shape(variable: keras.Variable) -> tuple[int, ...]:
    """The shape of a variable, or of the whole variable whose part it holds."""
    part = part_of(variable)
    return tuple(variable.shape) if part is None else part.shape


def whole_variables(variables: Sequence[keras.Variable]) -> list[keras.Variable]:
    """The variables that are equal on all ranks, because they do not hold a part of another one."""
    return [variable for variable in variables if part_of(variable) is None]
