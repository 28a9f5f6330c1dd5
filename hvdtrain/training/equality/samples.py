"""The samples of a check: a part of each rank's batch, and the batch of all parts together."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.replica_consistency import sha256_of
from hvdtrain.errors import DisagreementError


@dataclasses.dataclass(frozen=True)
class Samples:
    """The samples of all ranks, in rank order."""

    whole: Any
    """What a step of one process receives."""
    part: Any
    """What a step of this rank receives: its rows of the whole."""
    rows: "Rows"
    are_the_same: bool
    """Whether all ranks have brought the same batch."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """Which rows of the whole batch a rank has."""

    rank: int
    sizes: tuple[int, ...]
    """The number of rows of each rank."""

    @property
    def total(self) -> int:
        """The number of rows of the whole batch."""
        return sum(self.sizes)

    @property
    def share(self) -> float:
        """This rank's share of the rows."""
        return self.sizes[self.rank] / self.total

    @property
    def are_equally_many(self) -> bool:
        """Whether all ranks have the same number of rows."""
        return len(set(self.sizes)) == 1

    def part_of(self, whole_size: int, part_size: int) -> slice | None:
        """The part of a dimension of the whole batch that belongs to this rank; None if it is no dimension of samples.

        A dimension may hold several entries for each sample.
        """
        parts = self.parts_of(whole_size)
        if parts is None or parts[self.rank].stop - parts[self.rank].start != part_size:
            return None
        return parts[self.rank]

    def parts_of(self, whole_size: int) -> list[slice] | None:
        """The parts of a dimension of the whole batch that belong to the ranks; None if it is none of samples."""
        if whole_size % self.total:
            return None
        per_row = whole_size // self.total
        ends = [per_row * end for end in itertools.accumulate(self.sizes)]
        return [slice(end - per_row * size, end) for end, size in zip(ends, self.sizes, strict=True)]


def gather_samples(batch: Any, collectives: Collectives, *, equally_many: bool = False) -> Samples | None:
    """Takes so many samples of each rank's batch that all together are one batch; None if ranks have no samples.

    All ranks must call it. Batches that are padded to different lengths are padded with zeros to the longest.

    Args:
        equally_many: take the same number of each rank, also of batches of different sizes.

    Raises:
        DisagreementError: on every rank: batches consist of different tensors, or some have other dimensions.
    """
    flat = tf.nest.flatten(batch)
    num_rows = _num_rows(flat)
    num_sent = max(1, num_rows // collectives.size) if num_rows else 0
    own = [_to_host(each, num_sent if _has_rows(each, num_rows) else None) for each in flat]
    dimensions = ", ".join(map(_dimensions, flat))
    everyone = collectives.allgather((num_sent, own, _digest(flat, num_rows), dimensions))
    first = everyone[0][-1]
    for rank, (*_, others) in enumerate(everyone):
        if others != first:
            raise DisagreementError(
                f"the batches of all ranks must have tensors of the same dimensions. Received: {first} on rank 0, "
                f"{others} on rank {rank}. Give all ranks data of the same structure."
            )
    sizes = [number for number, *_ in everyone]
    if min(sizes) == 0:
        return None
    rows = Rows(collectives.rank, tuple([min(sizes)] * len(sizes) if equally_many else sizes))
    leaves = [_Leaf([each[i] for _, each, *_ in everyone], rows) for i in range(len(flat))]
    return Samples(
        whole=tf.nest.pack_sequence_as(batch, [each.whole() for each in leaves]),
        part=tf.nest.pack_sequence_as(batch, [each.part() for each in leaves]),
        rows=rows,
        are_the_same=len({digest for _, _, digest, _ in everyone}) == 1 and everyone[0][2] is not None,
    )


def _dimensions(leaf: Any) -> str:
    kind = (
        " (ragged)" if isinstance(leaf, tf.RaggedTensor) else " (sparse)" if isinstance(leaf, tf.SparseTensor) else ""
    )
    return f"{len(getattr(leaf, 'shape', ()))}{kind}"


def _digest(flat: Sequence[Any], num_rows: int) -> str | None:
    """A digest of a batch; None if its samples are all the same, so that it says nothing about other ranks' samples."""
    arrays = [np.asarray(each) for each in flat if _has_rows(each, num_rows) and not _is_composite(each)]
    if all(np.array_equal(array[:1].repeat(len(array), 0), array) for array in arrays):
        return None
    return sha256_of(array if array.dtype != object else array.astype(bytes) for array in arrays)


def _num_rows(flat: Sequence[Any]) -> int:
    sizes = [_first_dimension(each) for each in flat]
    return next((size for size in sizes if size), 0)


def _first_dimension(leaf: Any) -> int:
    shape: Any = getattr(leaf, "shape", ())
    return int(shape[0]) if len(shape) else 0


def _has_rows(leaf: Any, num_rows: int) -> bool:
    return _first_dimension(leaf) == num_rows


def _to_host(leaf: Any, num_rows: int | None) -> Any:
    """A leaf of a batch as NumPy arrays that can be sent, with its first rows; all of it if it has no rows."""
    if num_rows is None:
        return leaf.numpy() if tf.is_tensor(leaf) and not _is_composite(leaf) else None if tf.is_tensor(leaf) else leaf
    if isinstance(leaf, tf.SparseTensor):
        size = tf.concat([[num_rows], leaf.dense_shape[1:]], 0)
        leaf = tf.sparse.slice(leaf, tf.zeros_like(leaf.dense_shape), tf.cast(size, tf.int64))
        return [leaf.indices.numpy(), leaf.values.numpy(), leaf.dense_shape.numpy()]
    leaf = leaf[:num_rows]
    if isinstance(leaf, tf.RaggedTensor):
        return [leaf.flat_values.numpy(), *(each.numpy() for each in leaf.nested_row_splits)]
    return _Dense(np.asarray(leaf))


@dataclasses.dataclass(frozen=True)
class _Dense:
    array: np.ndarray


class _Leaf:
    """One leaf of the batches of all ranks."""

    def __init__(self, received: Sequence[Any], rows: Rows):
        self._rows = rows
        self._parts: list[Any] = []
        self._constant: Any = None
        first = received[0]
        if isinstance(first, _Dense):
            arrays = [each.array[:size] for each, size in zip(received, rows.sizes, strict=True)]
            longest = np.max([array.shape[1:] for array in arrays], axis=0)
            self._parts = [tf.constant(_padded(array, longest)) for array in arrays]
            self._concatenate: Callable[[Sequence[Any]], Any] = lambda parts: tf.concat(parts, 0)
        elif isinstance(first, list) and len(first) == 3 and first[0].ndim == 2 and len(first[2]) == first[0].shape[1]:
            self._parts = [_sparse(each, size) for each, size in zip(received, rows.sizes, strict=True)]
            self._concatenate = lambda parts: tf.sparse.concat(0, parts, expand_nonconcat_dims=True)
        elif isinstance(first, list):
            ragged = [tf.RaggedTensor.from_nested_row_splits(each[0], each[1:]) for each in received]
            self._parts = [each[:size] for each, size in zip(ragged, rows.sizes, strict=True)]
            self._concatenate = lambda parts: tf.concat(parts, 0)
        else:
            self._constant = first

    def whole(self) -> Any:
        return self._concatenate(self._parts) if self._parts else self._constant

    def part(self) -> Any:
        return self._parts[self._rows.rank] if self._parts else self._constant


def _sparse(received: Sequence[np.ndarray], num_rows: int) -> tf.SparseTensor:
    indices, values, shape = received
    size = [num_rows, *shape[1:]]
    return tf.sparse.slice(tf.SparseTensor(indices, values, shape), np.zeros(len(shape), np.int64), size)


def _padded(array: np.ndarray, row_shape: np.ndarray) -> np.ndarray:
    shape = (len(array), *map(int, row_shape))
    if array.shape == shape:
        return array
    padded = np.full(shape, b"" if array.dtype == object else 0, array.dtype)
    padded[tuple(slice(size) for size in array.shape)] = array
    return padded


def _is_composite(leaf: Any) -> bool:
    return isinstance(leaf, tf.RaggedTensor | tf.SparseTensor)
