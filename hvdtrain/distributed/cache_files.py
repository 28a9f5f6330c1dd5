"""The files of ``tf.data.Dataset.cache``: one for each rank, which all pass the same path."""

import functools
import os
from typing import Any

import tensorflow as tf

from hvdtrain.distributed.collectives import Collectives

_cache_here = tf.data.Dataset.cache


def separate_cache_files(collectives: Collectives) -> None:
    """From now on, each rank caches data in files of its own.

    TensorFlow refuses two iterators that write to one path. The names have the number of ranks, too: of parts of the
    data, a rank of another job would read those that it does not have.
    """

    @functools.wraps(_cache_here)
    def cache(self: tf.data.Dataset, filename: Any = "", name: str | None = None) -> tf.data.Dataset:
        if isinstance(filename, str | os.PathLike) and (path := os.fspath(filename)):
            filename = f"{path}.rank{collectives.rank}-of-{collectives.size}"
        return _cache_here(self, filename, name)

    tf.data.Dataset.cache = cache
