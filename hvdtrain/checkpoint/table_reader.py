"""``hvdtrain.TableReader``: rows of sharded tables from a checkpoint, for serving, without reading whole tables."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.checkpoint.config import CHECKPOINTS
from hvdtrain.checkpoint.joined_parts import PARTS
from hvdtrain.checkpoint.rank_file import RankFileReader
from hvdtrain.checkpoint.storage import RANKS, checkpoints_in, is_checkpoint, read_manifest
from hvdtrain.errors import DataError, UsageError

_MODEL = "model/"


class TableReader:
    """Reads rows of a model's sharded tables from a checkpoint. Needs neither ranks nor TensorFlow's memory.

    The file is memory-mapped: rows are read from disk when they are used. ::

        reader = hvdtrain.TableReader("runs/clicks")
        rows = reader.rows("tables/embeddings", [17, 4, 99])

    Args:
        path: of a checkpoint, of a folder of checkpoints, or of a run; of several checkpoints, the latest is read.

    Raises:
        DataError: there is no checkpoint, or it has no sharded tables.
    """

    def __init__(self, path: str | Path):
        folder = _newest(Path(path))
        manifest = read_manifest(folder)
        self.num_ranks = int(manifest["ranks"])
        """The number of ranks that have saved rows: row r is row r // num_ranks of rank r % num_ranks."""
        self.shapes: Mapping[str, tuple[int, ...]] = _tables_in(manifest)
        """The shapes of the whole tables by name."""
        if not self.shapes:
            raise DataError(
                f"the checkpoint must have sharded tables. Received: {folder}, which has none. Read other weights by "
                f'tf.train.load_checkpoint("{folder}/state").'
            )
        self._file = RankFileReader(folder / RANKS, self.num_ranks)

    def shard(self, name: str, rank: int) -> np.ndarray:
        """The rows of one rank, memory-mapped; the last one may not be in the table.

        Raises:
            UsageError: there is no such table, or no such rank.
        """
        if name not in self.shapes or not 0 <= rank < self.num_ranks:
            raise UsageError(
                f"tables are {', '.join(self.shapes)}, on ranks 0 to {self.num_ranks - 1}. Received: {name!r}, rank "
                f"{rank}"
            )
        return self._file.mapped(rank, _MODEL + name)

    def rows(self, name: str, ids: Any) -> np.ndarray:
        """The rows of a table with these ids, shape ``[*ids.shape, width]``.

        Raises:
            UsageError: there is no such table, or an id is out of range.
        """
        ids = np.asarray(ids)
        shards = [self.shard(name, rank) for rank in range(self.num_ranks)]
        num_rows, *width = self.shapes[name]
        unknown = ids[(ids < 0) | (ids >= num_rows)]
        if unknown.size:
            raise UsageError(f"ids of {name!r} must be from 0 to {num_rows - 1:,}. Received: {unknown[0]}")
        result = np.empty((*ids.shape, *width), shards[0].dtype)
        for rank, rows in enumerate(shards):
            mine = ids % self.num_ranks == rank
            result[mine] = rows[ids[mine] // self.num_ranks]
        return result


def _newest(path: Path) -> Path:
    if is_checkpoint(path.name):
        return path
    found = checkpoints_in(path) or checkpoints_in(path / CHECKPOINTS)
    if not found:
        raise DataError(f"there must be a checkpoint. Received: none in {path}")
    return found[-1]


def _tables_in(manifest: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    shapes = {name: tuple(shape) for name, shape, _ in manifest["variables"]}
    parts = {name: shape for name, shape, _ in manifest["own"].get(PARTS, [])}
    return {
        name.removeprefix(_MODEL): shapes[name]
        for name, shape in parts.items()
        if name.startswith(_MODEL) and len(shape) == len(shapes[name]) > 1
    }
