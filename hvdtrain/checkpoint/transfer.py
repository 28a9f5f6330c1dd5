"""Moves arrays between rank 0 and the other ranks in bounded pieces, so that rank 0 never holds those of all ranks."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Protocol, TypeAlias

import numpy as np
import tensorflow as tf

from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.row_shards import row_blocks

PIECE_BYTES = 32 << 20
"""The most bytes that rank 0 exchanges with all ranks together at a time."""

Spec: TypeAlias = tuple[str, list[int], str]
"""Name, shape and dtype of an array."""


class InBlocks(Protocol):
    """An array that is never in memory as a whole."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...

    def blocks(self) -> Iterator[np.ndarray]:
        """Its rows, in order."""
        ...


AnyArray: TypeAlias = np.ndarray | InBlocks


def specs_of(arrays: Mapping[str, AnyArray]) -> list[Spec]:
    """The specs of arrays, in order."""
    return [(name, list(array.shape), str(array.dtype)) for name, array in arrays.items()]


def dtype_of(name: str) -> np.dtype:
    """The dtype of a name; NumPy alone does not know bfloat16."""
    return np.dtype(tf.as_dtype(name).as_numpy_dtype)


def num_bytes(spec: Spec) -> int:
    """The size of an array."""
    return int(np.prod(spec[1], dtype=np.int64)) * dtype_of(spec[2]).itemsize


class ArrayReader:
    """Reads the bytes of arrays, one after another, in pieces."""

    def __init__(self, arrays: Sequence[AnyArray]):
        self._blocks = (
            block for each in arrays for block in ([each] if isinstance(each, np.ndarray) else each.blocks())
        )
        self._rest = np.empty(0, np.uint8)
        self.num_bytes = sum(math.prod(each.shape) * each.dtype.itemsize for each in arrays)

    def read(self, size: int) -> np.ndarray:
        """The next bytes, fewer at the end."""
        parts = []
        while size:
            if not len(self._rest):
                if (block := next(self._blocks, None)) is None:
                    break
                # A view as bytes copies nothing.
                self._rest = np.ascontiguousarray(block).reshape(-1).view(np.uint8)
            parts.append(self._rest[:size])
            self._rest = self._rest[size:]
            size -= len(parts[-1])
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.uint8), *parts])


class ArrayWriter:
    """Assembles arrays from pieces, and passes on each as soon as it is complete.

    Args:
        complete: called with the name of an array, and the array.
        in_blocks: for the names of arrays that are passed on in blocks of rows instead: called with the number of the
            first row, and the rows.
    """

    def __init__(
        self,
        specs: Sequence[Spec],
        complete: Callable[[str, np.ndarray], None],
        in_blocks: Mapping[str, Callable[[int, np.ndarray], None]] = MappingProxyType({}),
    ):
        self._specs = specs
        self._complete = complete
        self._in_blocks = in_blocks
        self._blocks = self._all_blocks()
        self._begin_next()

    def write(self, piece: np.ndarray) -> None:
        """Adds the next bytes."""
        while len(piece):
            part = piece[: len(self._bytes) - self._filled]
            self._bytes[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            piece = piece[len(part) :]
            if self._filled == len(self._bytes):
                self._end()

    def _all_blocks(self) -> Iterator[tuple[Spec, Callable[[np.ndarray], None]]]:
        """What is assembled next, and to whom it is passed on."""
        for spec in self._specs:
            name, shape, dtype = spec
            if name not in self._in_blocks:
                yield spec, partial(self._complete, name)
                continue
            for start, end in row_blocks(shape, dtype_of(dtype).itemsize):
                yield (name, [end - start, *shape[1:]], dtype), partial(self._in_blocks[name], start)

    def _begin_next(self) -> None:
        for spec, pass_on in self._blocks:
            _, shape, dtype = spec
            self._bytes, self._filled = np.empty(num_bytes(spec), np.uint8), 0
            self._array, self._pass_on = self._bytes.view(dtype_of(dtype)).reshape(shape), pass_on
            if len(self._bytes):
                return
            self._pass_on(self._array)
        self._bytes, self._filled = np.empty(0, np.uint8), 0

    def _end(self) -> None:
        self._pass_on(self._array)
        self._begin_next()


def to_first_rank(
    arrays: Sequence[AnyArray], collectives: Collectives, receive: Callable[[int, np.ndarray], None]
) -> None:
    """Rank 0 receives the bytes of every rank's arrays, in order. Collective: all ranks must call it.

    Args:
        receive: called on rank 0 with a rank and its next bytes; must not raise.
    """
    own, nothing = ArrayReader(arrays), np.empty(0, np.uint8)
    piece = _piece_bytes(collectives)
    for _ in range(_num_rounds(own.num_bytes, piece, collectives)):
        mine = own.read(piece)
        sent = nothing if collectives.rank == 0 else mine
        received = collectives.alltoall([sent, *[nothing] * (collectives.size - 1)])
        if collectives.rank == 0:
            for rank, part in enumerate([mine, *received[1:]]):
                if len(part):
                    receive(rank, part)


def from_first_rank(
    read: Callable[[int, int], np.ndarray], size: int, collectives: Collectives, receive: Callable[[np.ndarray], None]
) -> None:
    """Every rank receives bytes that rank 0 reads for it. Collective: all ranks must call it.

    Args:
        read: called on rank 0 with a rank and a number of bytes, for the rank's next bytes, fewer at the end.
        size: the number of bytes that this rank receives.
        receive: called with the next bytes; must not raise.
    """
    nothing, piece = np.empty(0, np.uint8), _piece_bytes(collectives)
    for _ in range(_num_rounds(size, piece, collectives)):
        mine, pieces = nothing, [nothing] * collectives.size
        if collectives.rank == 0:
            mine, *others = (read(rank, piece) for rank in range(collectives.size))
            pieces = [nothing, *others]
        received = collectives.alltoall(pieces)[0]
        receive(mine if collectives.rank == 0 else received)


def _piece_bytes(collectives: Collectives) -> int:
    return PIECE_BYTES // max(1, collectives.size - 1)


def _num_rounds(size: int, piece: int, collectives: Collectives) -> int:
    return max(-(-each // piece) for each in collectives.allgather(size))
