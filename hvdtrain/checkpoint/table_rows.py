"""Saves and restores the rows of sharded tables, on any number of ranks, in blocks: memory holds no second copy."""

from collections.abc import Iterator, Mapping

import keras
import numpy as np

from hvdtrain.checkpoint.joined_parts import JoinedParts
from hvdtrain.checkpoint.transfer import dtype_of
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.row_shards import RowShard, row_blocks, rows_from_first_rank, write_rows
from hvdtrain.distributed.snapshot import host_rows


class TableRows:
    """This rank's rows of a table, or of its state, read from the variable while they are written to a file."""

    def __init__(self, variable: keras.Variable):
        self._variable = variable
        self.shape = tuple(variable.shape)
        self.dtype = dtype_of(variable.dtype)

    def blocks(self) -> Iterator[np.ndarray]:
        """The rows, in order."""
        for start, end in row_blocks(self.shape, self.dtype.itemsize):
            yield host_rows(self._variable, slice(start, end))


def restore_rows(
    variable: keras.Variable, shard: RowShard, name: str, tensors: Mapping[str, np.ndarray], collectives: Collectives
) -> None:
    """Restores this rank's rows of a table, or of its state, in bounded pieces. All ranks must call it.

    Args:
        name: in the checkpoint.
        tensors: of the checkpoint; used on rank 0 only.
    """
    dtype = dtype_of(variable.dtype)
    blocks = _blocks(tensors, name, shard, dtype.itemsize)
    for place, rows in rows_from_first_rank(blocks, dtype, shard, collectives):
        write_rows(variable, place.start, rows)


def _blocks(tensors: Mapping[str, np.ndarray], name: str, shard: RowShard, itemsize: int) -> Iterator[np.ndarray]:
    """The rows of a table in a checkpoint, in order, in blocks."""
    if isinstance(tensors, JoinedParts) and tensors.has_rows(name):
        for start, end in shard.blocks(itemsize):
            yield tensors.rows(name, start, end)
        return
    whole = tensors[name]  # It was saved by one process.
    for start, end in shard.blocks(itemsize):
        yield whole[start:end]
