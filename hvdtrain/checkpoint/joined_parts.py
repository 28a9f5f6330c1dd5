"""Joins the variables of a sharded optimizer from the parts that the ranks have saved in a checkpoint."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from hvdtrain.checkpoint.rank_file import RankFileReader
from hvdtrain.distributed.shards import whole_of_arrays

PARTS = "parts"
"""The manifest's group of a rank's arrays that are its parts of optimizer variables."""


class JoinedParts(Mapping[str, np.ndarray]):
    """The shared tensors of a checkpoint, and those joined from the parts of all ranks; read on demand.

    Args:
        tensors: the shared tensors.
        ranks: the arrays of each rank.
        manifest: the checkpoint's manifest.

    Raises:
        LookupError, TypeError, ValueError: the manifest is not as hvdtrain writes it.
    """

    def __init__(self, tensors: Mapping[str, np.ndarray], ranks: RankFileReader, manifest: Mapping[str, Any]):
        self._tensors = tensors
        self._ranks = ranks
        shapes = {name: shape for name, shape, _ in manifest["variables"]}
        self._shapes = {name: shapes[name] for name, _, _ in manifest["own"].get(PARTS, [])}
        for name, shape, _ in manifest["own"].get(PARTS, []):
            if len(shape) != 1 or shape[0] * len(ranks.specs) < int(np.prod(shapes[name], dtype=np.int64)):
                raise ValueError(f"{name} has parts of shape {shape}, but is of shape {shapes[name]}")

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._shapes:
            return self._tensors[name]
        parts = [self._ranks.array(rank, name) for rank in range(len(self._ranks.specs))]
        return whole_of_arrays(parts, self._shapes[name])

    def __iter__(self) -> Iterator[str]:
        yield from self._tensors
        yield from self._shapes

    def __len__(self) -> int:
        return len(self._tensors) + len(self._shapes)
