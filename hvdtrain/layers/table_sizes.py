"""How much memory sharded tables take on each rank."""

import keras
import numpy as np

from hvdtrain.distributed.bounded_messages import num_bytes
from hvdtrain.distributed.optimizers import optimizer_variables
from hvdtrain.distributed.row_shards import RowShard
from hvdtrain.distributed.shards import row_shard_of
from hvdtrain.errors import UsageError
from hvdtrain.system import memory


def sizes_text(model: keras.Model) -> str | None:
    """The memory of a model's sharded tables and of their optimizers' state; None without such tables."""
    tables = [(each, shard) for each in model.weights if (shard := row_shard_of(each)) is not None]
    if not tables:
        return None
    state = [each for each in optimizer_variables(model) if row_shard_of(each) is not None]
    each_text = ", ".join(f"{v.path} {shard.shape[0]:,} x {shard.shape[1]}" for v, shard in tables[:3])
    more = f" and {len(tables) - 3} more" if len(tables) > 3 else ""
    rows_bytes, state_bytes = (
        sum(num_bytes(each.value) for each in group) for group in ([t for t, _ in tables], state)
    )
    return (
        f"{each_text}{more}, sharded over {tables[0][1].num_ranks} ranks: {rows_bytes / 1e9:,.3f} GB of rows and "
        f"{state_bytes / 1e9:,.3f} GB of optimizer state on each"
    )


def require_memory_for_rows(name: str, shard: RowShard, itemsize: int) -> None:
    """Refuses a table whose rows do not fit into memory, before they are made.

    Raises:
        UsageError: they do not.
    """
    needed = shard.num_rows * int(np.prod(shard.shape[1:], dtype=np.int64)) * itemsize
    available = memory.available_bytes()
    if needed > available:
        raise UsageError(
            f"the rows of a table must fit into memory. Received: {name!r}, {shard.shape[0]:,} x {shard.shape[1]}, of "
            f"which each of {shard.num_ranks} ranks needs {needed / 1e9:,.1f} GB; {available / 1e9:,.1f} GB are "
            "available. Use more hosts."
        )
