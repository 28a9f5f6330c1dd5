"""The rows of a table that a rank has, if the table is sharded over ranks, and how rows travel from rank to rank.

Row r of a table is on rank r mod N. The first rows are often the most used ones (vocabularies are sorted by frequency),
and so are spread over all ranks.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.snapshot import host_rows, resource_of

BLOCK_BYTES = 32 << 20
"""The most bytes of a table that are moved at a time."""


@dataclasses.dataclass(frozen=True)
class RowShard:
    """One rank's rows of a table."""

    shape: tuple[int, ...]
    """The shape of the whole table."""
    rank: int
    num_ranks: int

    @property
    def num_rows(self) -> int:
        """Number of rows, the same on every rank: some ranks have a last row that is not in the table."""
        return -(-self.shape[0] // self.num_ranks)

    def of(self, whole: tf.Tensor) -> tf.Tensor:
        """This rank's rows of a whole table."""
        own = whole[self.rank :: self.num_ranks]
        missing = self.num_rows - own.shape[0]
        return tf.pad(own, [[0, missing], *[[0, 0]] * (len(self.shape) - 1)]) if missing else own

    def rows_in(self, start: int, end: int) -> tuple[slice, slice]:
        """The rows of this rank among those from ``start`` to ``end`` of the whole table.

        Returns:
            Where they are in the whole table's rows from ``start`` on, and where they are on this rank.
        """
        first = start + (self.rank - start) % self.num_ranks
        count = max(0, -(-(min(end, self.shape[0]) - first) // self.num_ranks))
        begin = first // self.num_ranks
        return slice(first - start, end - start, self.num_ranks), slice(begin, begin + count)

    def blocks(self, bytes_per_element: int) -> list[tuple[int, int]]:
        """The first and last row (exclusive) of blocks of the whole table, of at most :data:`BLOCK_BYTES`."""
        return row_blocks(self.shape, bytes_per_element)


def row_blocks(shape: Sequence[int], bytes_per_element: int) -> list[tuple[int, int]]:
    """The first and last row (exclusive) of blocks of a tensor, of at most :data:`BLOCK_BYTES`."""
    row_bytes = bytes_per_element * int(np.prod(shape[1:], dtype=np.int64))
    step = max(1, BLOCK_BYTES // max(1, row_bytes))
    return [(start, min(start + step, shape[0])) for start in range(0, shape[0], step)]


def whole_of_rows(shards: Sequence[np.ndarray], num_rows: int) -> np.ndarray:
    """Consecutive rows of a table, from the rows of all ranks; the first one is on rank 0."""
    longest = max(len(each) for each in shards)
    whole = np.empty((longest * len(shards), *shards[0].shape[1:]), shards[0].dtype)
    for rank, rows in enumerate(shards):
        whole[rank :: len(shards)][: len(rows)] = rows
    return whole[:num_rows]


def write_rows(variable: keras.Variable, start: int, rows: np.ndarray) -> None:
    """Replaces consecutive rows of a variable, from ``start`` on, in place: ``assign`` would need a second copy."""
    places = tf.range(start, start + len(rows))
    resource_of(variable).scatter_update(tf.IndexedSlices(tf.constant(rows), places))


def blocks_on_first_rank(variable: keras.Variable, shard: RowShard, collectives: Collectives) -> Iterator[np.ndarray]:
    """Rank 0 receives the rows of a whole table, block by block, in order; other ranks receive no rows. Collective.

    Args:
        variable: this rank's rows.
    """
    nothing = np.empty(0, np.uint8)
    for start, end in shard.blocks(resource_of(variable).dtype.size):
        _, place = shard.rows_in(start, end)
        own = host_rows(variable, place)
        row_bytes = own.itemsize * int(np.prod(own.shape[1:], dtype=np.int64))
        sent = own.reshape(-1).view(np.uint8)
        received = collectives.alltoall([sent, *[nothing] * (collectives.size - 1)])
        block = np.empty((end - start if collectives.rank == 0 else 0, *own.shape[1:]), own.dtype)
        if collectives.rank == 0:
            for rank, rows in enumerate(received):
                target, _ = dataclasses.replace(shard, rank=rank).rows_in(start, end)
                block[target] = rows.view(own.dtype).reshape(len(rows) // row_bytes, *own.shape[1:])
        yield block


def rows_from_first_rank(
    blocks: Iterator[np.ndarray], dtype: np.dtype, shard: RowShard, collectives: Collectives
) -> Iterator[tuple[slice, np.ndarray]]:
    """Rank 0 sends each rank its rows of a table, block by block. Collective.

    Args:
        blocks: on rank 0: the rows of the whole table, in the blocks of :meth:`RowShard.blocks`.

    Returns:
        The places of rows on this rank, and the rows.
    """
    nothing = np.empty(0, np.uint8)
    for start, end in shard.blocks(dtype.itemsize):
        pieces = [nothing] * collectives.size
        if collectives.rank == 0:
            block = next(blocks)
            for rank in range(collectives.size):
                source, _ = dataclasses.replace(shard, rank=rank).rows_in(start, end)
                pieces[rank] = np.ascontiguousarray(block[source]).reshape(-1).view(np.uint8)
        received = collectives.alltoall(pieces)[0]
        _, place = shard.rows_in(start, end)
        yield place, received.view(dtype).reshape(place.stop - place.start, *shard.shape[1:])
