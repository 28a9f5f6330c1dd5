"""Messages of bounded size: MPI counts elements in 32 bits, and Horovod silently corrupts larger messages."""

import math
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

MAX_MESSAGE_BYTES = 1 << 30
"""A larger tensor is sent in several messages."""


def in_pieces(tensor: tf.Tensor, send: Callable[[tf.Tensor, str], tf.Tensor]) -> tf.Tensor:
    """Applies an elementwise collective to a tensor of any size, in messages of at most ``MAX_MESSAGE_BYTES``.

    Args:
        send: receives a tensor and a suffix for the name of the message, the same on every rank.
    """
    num_elements = tensor.shape.num_elements()
    if num_elements is None or num_elements * tensor.dtype.size <= MAX_MESSAGE_BYTES:
        return send(tensor, "")
    flat = tf.reshape(tensor, [-1])
    bounds = piece_bounds(num_elements, tensor.dtype.size)
    pieces = [send(flat[start:end], f"_piece_{start}") for start, end in bounds]
    return tf.reshape(tf.concat(pieces, axis=0), tensor.shape)


def blocks(shape: Sequence[int], element_bytes: int) -> Iterator[tuple[slice, ...]]:
    """Cuts a tensor into blocks of at most ``MAX_MESSAGE_BYTES``, as slices of its leading dimensions."""
    row_elements = math.prod(shape[1:])
    if math.prod(shape) * element_bytes <= MAX_MESSAGE_BYTES:
        yield ()
    elif row_elements * element_bytes > MAX_MESSAGE_BYTES:
        for i in range(shape[0]):
            for rest in blocks(shape[1:], element_bytes):
                yield (slice(i, i + 1), *rest)
    else:
        for start, end in piece_bounds(shape[0], row_elements * element_bytes):
            yield (slice(start, end),)


def piece_bounds(num_elements: int, element_bytes: int) -> list[tuple[int, int]]:
    """The first and last element (exclusive) of each message that a vector is sent in; none if it is empty."""
    step = max(1, MAX_MESSAGE_BYTES // element_bytes)
    return [(start, min(start + step, num_elements)) for start in range(0, num_elements, step)]
