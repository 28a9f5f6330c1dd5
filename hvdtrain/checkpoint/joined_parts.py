"""Joins the variables of a sharded optimizer, and sharded tables, from what the ranks have saved in a checkpoint."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.checkpoint.rank_file import RankFileReader
from hvdtrain.checkpoint.shared_tensors import SharedTensors
from hvdtrain.distributed.row_shards import RowShard
from hvdtrain.distributed.shards import whole_of_arrays

PARTS = "parts"
"""The manifest's group of a rank's arrays that are its parts of optimizer variables, or its rows of tables."""


class JoinedParts(Mapping[str, np.ndarray]):
    """The shared tensors of a checkpoint, and those joined from the parts of all ranks; read on demand.

    Args:
        tensors: the shared tensors.
        ranks: the arrays of each rank.
        manifest: the checkpoint's manifest.

    Raises:
        LookupError, TypeError, ValueError: the manifest is not as hvdtrain writes it.
    """

    def __init__(self, tensors: SharedTensors, ranks: RankFileReader, manifest: Mapping[str, Any]):
        self._tensors = tensors
        self._ranks = ranks
        shapes = {name: shape for name, shape, _ in manifest["variables"]}
        self._shapes = {name: shapes[name] for name, _, _ in manifest["own"].get(PARTS, [])}
        self._tables: set[str] = set()
        """The variables of which each rank has saved its rows, rather than a vector."""
        for name, shape, _ in manifest["own"].get(PARTS, []):
            if len(shape) == len(shapes[name]) > 1:
                self._tables.add(name)
                if shape[0] * len(ranks.specs) < shapes[name][0] or shape[1:] != shapes[name][1:]:
                    raise ValueError(f"{name} has rows of shape {shape}, but is of shape {shapes[name]}")
                continue
            if len(shape) != 1 or shape[0] * len(ranks.specs) < int(np.prod(shapes[name], dtype=np.int64)):
                raise ValueError(f"{name} has parts of shape {shape}, but is of shape {shapes[name]}")

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._shapes:
            return self._tensors[name]
        if name in self._tables:
            return self.rows(name, 0, self._shapes[name][0])
        parts = [self._ranks.array(rank, name) for rank in range(len(self._ranks.specs))]
        return whole_of_arrays(parts, self._shapes[name])

    def tensor(self, name: str) -> tf.Tensor:
        """The same as a tensor."""
        return tf.convert_to_tensor(self[name]) if name in self._shapes else self._tensors.tensor(name)

    def __contains__(self, name: object) -> bool:
        # Mapping's own would read the tensor.
        return name in self._shapes or name in self._tensors

    def has_rows(self, name: str) -> bool:
        """Whether ranks have saved rows of a table under this name."""
        return name in self._tables

    def rows(self, name: str, start: int, end: int) -> np.ndarray:
        """Rows of a whole table, from ``start`` to ``end`` (exclusive)."""
        num_ranks, result = len(self._ranks.specs), np.empty(0)
        for rank in range(num_ranks):
            target, place = RowShard(tuple(self._shapes[name]), rank, num_ranks).rows_in(start, end)
            rows = self._ranks.rows(rank, name, place)
            result = result if result.size else np.empty((end - start, *rows.shape[1:]), rows.dtype)
            result[target] = rows
        return result

    def __iter__(self) -> Iterator[str]:
        yield from self._tensors
        yield from self._shapes

    def __len__(self) -> int:
        return len(self._tensors) + len(self._shapes)
