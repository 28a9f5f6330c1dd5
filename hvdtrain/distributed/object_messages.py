"""Gathers Python objects in messages of bytes."""

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from hvdtrain.distributed.bounded_messages import message_bounds

_SIZE_BYTES = np.dtype(np.int64).itemsize
# Most values that ranks compare are digests, numbers and short texts. Thousands of ranks send these bytes each time.
_FIRST_BYTES = 256 - _SIZE_BYTES


def allgather_objects(value: Any, num_ranks: int, allgather: Callable[[np.ndarray, str], np.ndarray]) -> list[Any]:
    """The picklable value of each rank, in rank order. All ranks must call it.

    The first message has the size of each object and its first bytes, and is the only one if all objects are short.

    Args:
        allgather: concatenates the bytes of all ranks; receives those of this rank, and the name of the message.
    """
    own = np.frombuffer(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL), np.uint8)
    first = np.zeros(_SIZE_BYTES + _FIRST_BYTES, np.uint8)
    first[:_SIZE_BYTES] = np.frombuffer(np.int64(own.size).tobytes(), np.uint8)
    first[_SIZE_BYTES : _SIZE_BYTES + own.size] = own[:_FIRST_BYTES]
    rows = allgather(first, "hvdtrain_allgather").reshape(num_ranks, -1)
    sizes = rows[:, :_SIZE_BYTES].copy().view(np.int64)[:, 0]
    received = [bytearray(row[_SIZE_BYTES:][:size].data) for row, size in zip(rows, sizes, strict=True)]

    remaining, remaining_sizes = own[_FIRST_BYTES:], np.maximum(sizes - _FIRST_BYTES, 0)
    for start, end in message_bounds(int(max(remaining_sizes)), element_bytes=num_ranks):
        together = allgather(remaining[start:end], "hvdtrain_allgather_remaining")
        ends = np.cumsum(np.clip(remaining_sizes - start, 0, end - start))
        for each, part in zip(received, np.split(together, ends[:-1]), strict=True):
            each += part.data
    # One by one, so that memory never holds all of them twice.
    return [pickle.loads(received.pop(0)) for _ in range(num_ranks)]
