"""The initial rows of a sharded table: a function of the seed and the row alone, whatever the number of ranks.

A rank draws the table block by block and keeps its own rows, so that no rank ever holds the table as a whole.
"""

import numpy as np
import tensorflow as tf
from keras import initializers

from hvdtrain.distributed.row_shards import RowShard
from hvdtrain.errors import UsageError

# Part of what a seed means.
_BLOCK_ELEMENTS = 1 << 20
_CONSTANTS = (initializers.Zeros, initializers.Ones, initializers.Constant)
_DRAWN = (initializers.RandomUniform, initializers.RandomNormal, initializers.TruncatedNormal)


def require_elementwise(initializer: object) -> None:
    """Refuses an initializer whose rows depend on other rows.

    Raises:
        UsageError: it is not known to draw each element by itself.
    """
    if type(initializer) not in (*_CONSTANTS, *_DRAWN) and not isinstance(initializer, initializers.VarianceScaling):
        names = ", ".join(each.__name__ for each in (*_DRAWN, initializers.VarianceScaling, *_CONSTANTS))
        raise UsageError(
            f"embeddings_initializer of a sharded table must draw each row by itself: {names} and its subclasses. "
            f"Received: {type(initializer).__name__}. Use one of them."
        )


def seed_of(initializer: initializers.Initializer) -> int:
    """The seed that an initializer was made with, or has chosen; 0 if it draws nothing."""
    seed = getattr(initializer, "seed", 0)
    return seed if isinstance(seed, int) else int(np.asarray(seed.next()).ravel()[0])


def draw_rows(initializer: initializers.Initializer, seed: int, shard: RowShard, dtype: str) -> tf.Tensor:
    """The initial rows of a rank, shape ``[shard.num_rows, width]``; rows that are not in the table are zeros."""
    num_rows, width = shard.shape
    rows = tf.raw_ops.Empty(shape=[shard.num_rows, width], dtype=tf.as_dtype(dtype), init=True)
    step = max(1, _BLOCK_ELEMENTS // width)
    for number, start in enumerate(range(0, num_rows, step)):
        source, place = shard.rows_in(start, min(start + step, num_rows))
        drawn = _of_block(initializer, _block_seed(seed, number), shard)((step, width), dtype=dtype)
        own = tf.convert_to_tensor(drawn)[source][: place.stop - place.start]
        rows = tf.raw_ops.InplaceUpdate(x=rows, i=tf.range(place.start, place.stop), v=own)
    return rows


def _block_seed(seed: int, number: int) -> int:
    return int(np.random.SeedSequence([abs(seed), number]).generate_state(1)[0] >> 1)


def _of_block(initializer: initializers.Initializer, seed: int, shard: RowShard) -> initializers.Initializer:
    """An initializer whose block is distributed as the whole table is."""
    if isinstance(initializer, _CONSTANTS):
        return initializer
    if not isinstance(initializer, initializers.VarianceScaling):
        return type(initializer).from_config({**initializer.get_config(), "seed": seed})
    # Its variance depends on the shape, of which the block has a part.
    num_rows, width = shard.shape
    step = max(1, _BLOCK_ELEMENTS // width)
    fans = {"fan_in": (num_rows, step), "fan_out": (width, width), "fan_avg": (num_rows + width, step + width)}
    of_table, of_block = fans[initializer.mode]
    scale = initializer.scale * max(1.0, of_block) / max(1.0, of_table)
    return initializers.VarianceScaling(scale, initializer.mode, initializer.distribution, seed)
