"""Restores the rows of sharded tables on any number of ranks; no rank ever holds a table as a whole."""

from collections.abc import Iterator, Mapping

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.checkpoint.joined_parts import JoinedParts
from hvdtrain.checkpoint.transfer import dtype_of
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.row_shards import RowShard, rows_from_first_rank


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
        # In place: assign would need a second copy.
        variable.value.scatter_update(tf.IndexedSlices(tf.constant(rows), tf.range(place.start, place.stop)))


def _blocks(tensors: Mapping[str, np.ndarray], name: str, shard: RowShard, itemsize: int) -> Iterator[np.ndarray]:
    """The rows of a table in a checkpoint, in order, in blocks."""
    if isinstance(tensors, JoinedParts) and tensors.has_rows(name):
        for start, end in shard.blocks(itemsize):
            yield tensors.rows(name, start, end)
        return
    whole = tensors[name]  # It was saved by one process.
    for start, end in shard.blocks(itemsize):
        yield whole[start:end]
