"""A model whose sharded tables are plain embeddings for a moment, so that it can be saved."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from hvdtrain.distributed import runtime
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.optimizers import leaves_of
from hvdtrain.distributed.row_shards import RowShard, blocks_on_first_rank
from hvdtrain.distributed.shards import row_shard_of
from hvdtrain.errors import UsageError
from hvdtrain.layers.sharded_embedding import ShardedEmbedding
from hvdtrain.optim.method_replacement import replace_method
from hvdtrain.seams import keras_internals
from hvdtrain.system import memory

# Keras copies weights while it saves them.
_COPIES = 2


@contextlib.contextmanager
def whole_tables(model: keras.Model, *, collectives: Collectives | None = None) -> Iterator[None]:
    """In the block, a model can be saved or exported on rank 0. All ranks must enter it::

        with hvdtrain.layers.whole_tables(model):
            if hvdtrain.is_main_process():
                model.save("model.keras")

    On rank 0, each sharded table is a ``keras.layers.Embedding`` with all rows, so that what is saved needs neither
    hvdtrain nor several ranks. A table with a ``combiner`` is a :class:`ShardedEmbedding` of one process: Keras loads
    it where hvdtrain is imported, and what ``model.export`` writes opens without. A saved model holds no state of the
    optimizer; :class:`hvdtrain.Checkpointer` keeps it. Do not train in the block.

    Args:
        collectives: the ranks that have the rows (default: those of ``hvdtrain.init()``).

    Raises:
        UsageError: on every rank: the tables do not fit into the memory of rank 0.
    """
    ranks = collectives or runtime.collectives()
    tables = _tables_of(model)
    with contextlib.ExitStack() as stack:
        if tables:
            _require_memory(tables, ranks)
            for layer, shard in tables:
                stack.callback(_replace(layer, shard, ranks))
            for leaf in leaves_of(model):
                stack.callback(replace_method(leaf, "save_own_variables", lambda store: None))
        yield


def bytes_of_tables(model: keras.Model) -> int:
    """The size of a model's sharded tables, over all ranks."""
    return sum(_num_bytes(layer, shard) for layer, shard in _tables_of(model))


def _tables_of(model: keras.Model) -> list[tuple[ShardedEmbedding, RowShard]]:
    layers = [each for each in keras_internals.FLATTEN_LAYERS.of(model)() if isinstance(each, ShardedEmbedding)]
    found = [(each, row_shard_of(keras_internals.EMBEDDINGS.of(each))) for each in layers if each.built]
    return [(layer, shard) for layer, shard in found if shard is not None]


def _num_bytes(layer: ShardedEmbedding, shard: RowShard) -> int:
    itemsize = keras_internals.EMBEDDINGS.of(layer).value.dtype.size
    return int(np.prod(shard.shape, dtype=np.int64)) * itemsize


def _require_memory(tables: list[tuple[ShardedEmbedding, RowShard]], ranks: Collectives) -> None:
    needed = _COPIES * sum(_num_bytes(layer, shard) for layer, shard in tables)
    available = ranks.allgather(memory.available_bytes())[0]
    if needed > available:
        raise UsageError(
            f"sharded tables must fit into the memory of rank 0 to be saved as one model. Received: {len(tables)} "
            f"tables, which take {needed / 1e9:,.1f} GB while they are saved; {available / 1e9:,.1f} GB are available. "
            "Read their rows from a checkpoint: hvdtrain.TableReader."
        )


def _replace(layer: Any, shard: RowShard, ranks: Collectives) -> Any:
    """Replaces a table by the whole one on rank 0; returns what undoes that."""
    own = keras_internals.EMBEDDINGS.of(layer)
    blocks = blocks_on_first_rank(own, shard, ranks)
    if ranks.rank > 0:
        for _ in blocks:
            pass
        return lambda: None
    whole = np.concatenate(list(blocks))
    plain = keras.Variable(whole, dtype=own.dtype, name="embeddings", trainable=own.trainable)
    kind, variables = type(layer), keras_internals.TRAINABLE_VARIABLES.of(layer)
    place = next(i for i, each in enumerate(variables) if each is own)

    def put(variable: keras.Variable, kind: type, shard: RowShard) -> None:
        # Past Keras' __setattr__, which adds no variables to a layer that is built.
        vars(layer)[keras_internals.EMBEDDINGS.name], vars(layer)["_shard"] = variable, shard
        variables[place] = variable
        layer.__class__ = kind

    put(plain, keras.layers.Embedding if layer.combiner is None else kind, RowShard(shard.shape, 0, 1))
    return lambda: put(own, kind, shard)
