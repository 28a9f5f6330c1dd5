"""Messages of bounded size: MPI counts elements in 32 bits, and Horovod silently corrupts larger messages."""

import math
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

MAX_MESSAGE_BYTES = 1 << 30
"""The most bytes that all ranks together send in one message. A larger object is sent in several."""
PIECE_BYTES = 64 << 20
"""A larger tensor is reduced or broadcast in pieces of this size, one after the other. It also limits the results that
are received at the same time, because they exist twice, as sent and as received."""
MAX_MESSAGE_ELEMENTS = 2**31 - 1
"""The most elements that all ranks together gather in one message."""
_MAX_POWER = 20
_MIN_WIDTH_BYTES = 1 << 10


def in_pieces(tensor: tf.Tensor, send: Callable[[tf.Tensor, str], tf.Tensor]) -> tf.Tensor:
    """Applies an elementwise collective to a tensor of any size, in messages of at most ``PIECE_BYTES``.

    In a compiled function, the results of a large tensor replace it piece by piece: it is never in memory twice, unless
    something else uses it too.

    Args:
        send: receives a tensor and a suffix for the name of the message, the same on every rank.
    """
    num_elements, element_bytes = tensor.shape.num_elements(), tensor.dtype.size
    if not is_large(tensor):
        return send(tensor, "")
    width = row_width(tensor.shape, element_bytes)
    # An eager tensor cannot be overwritten: its Python object uses it.
    if tf.executing_eagerly():
        return tf.reshape(tf.concat(list(_sent_pieces(tensor, width, send)), axis=0), tensor.shape)
    if width is None:
        return tf.reshape(_elements_in_pieces(tf.reshape(tensor, [-1]), send), tensor.shape)
    rows = tf.reshape(tensor, [num_elements // width, width])
    for start, end in piece_bounds(num_elements // width, width * element_bytes):
        positions = tf.range(start, end, dtype=tf.int64)
        # TensorFlow overwrites a tensor in place if nothing else uses it, so that what is sent must be a copy.
        received = send(tf.reshape(tf.gather(rows, positions), [-1]), f"_piece_{start * width}")
        rows = tf.tensor_scatter_nd_update(rows, positions[:, tf.newaxis], tf.reshape(received, [-1, width]))
    return tf.reshape(rows, tensor.shape)


def _elements_in_pieces(vector: tf.Tensor, send: Callable[[tf.Tensor, str], tf.Tensor]) -> tf.Tensor:
    """The same for a vector whose length has no factor that suits rows."""
    for start, end in piece_bounds(vector.shape[0], vector.dtype.size):
        # A copy: TensorFlow does not overwrite a vector in place while a part of it is in use.
        received = send(tf.raw_ops.DeepCopy(x=vector[start:end]), f"_piece_{start}")
        place = {"begin": [start], "end": [end], "strides": [1]}
        place = {name: tf.constant(value, tf.int64) for name, value in place.items()}
        vector = tf.raw_ops.TensorStridedSliceUpdate(input=vector, **place, value=received)
    return vector


def in_columns(matrix: tf.Tensor, num_rows: int, gather: Callable[[tf.Tensor, str], tf.Tensor]) -> tf.Tensor:
    """Gathers the rows of all ranks, in several blocks of columns if one message may be too small.

    Args:
        num_rows: the most rows that all ranks have together; 0 if unknown.
        gather: receives columns and a suffix for the name of the message, the same on every rank.
    """
    width = matrix.shape[1] if matrix.shape.rank == 2 else None
    if width is None or num_rows * width <= MAX_MESSAGE_ELEMENTS:
        return gather(matrix, "")
    step = max(1, MAX_MESSAGE_ELEMENTS // num_rows)
    blocks = [gather(matrix[:, start : start + step], f"_{start}") for start in range(0, width, step)]
    return tf.concat(blocks, axis=1)


def _sent_pieces(
    tensor: tf.Tensor, width: int | None, send: Callable[[tf.Tensor, str], tf.Tensor]
) -> Iterator[tf.Tensor]:
    """The received pieces, as vectors, one after the other."""
    width = width or 1
    flat = tf.reshape(tensor, [-1])
    last: list[tf.Tensor] = []
    for start, end in piece_bounds(tensor.shape.num_elements() // width, width * tensor.dtype.size):
        with tf.control_dependencies(last):
            received = send(flat[start * width : end * width], f"_piece_{start * width}")
            last = [arrival(received)]
        yield received


def row_width(shape: Sequence[int], element_bytes: int) -> int | None:
    """The number of elements per row into which a tensor can be reshaped, at most ``PIECE_BYTES``; None: only short
    rows.

    The longest among powers of two and products of the last dimensions of its shape.
    """
    most = max(1, PIECE_BYTES // element_bytes)
    power = 1 << min(_MAX_POWER, most.bit_length() - 1)
    widths = [math.gcd(math.prod(shape), power), *(math.prod(shape[i:]) for i in range(1, len(shape)))]
    smallest = min(_MIN_WIDTH_BYTES, PIECE_BYTES)
    fitting = [each for each in widths if smallest <= each * element_bytes <= PIECE_BYTES]
    return max(fitting, default=None)


def piece_bounds(num_elements: int, element_bytes: int) -> list[tuple[int, int]]:
    """The first and last element (exclusive) of each piece of a vector; none if it is empty."""
    return bounds(num_elements, element_bytes, PIECE_BYTES)


def message_bounds(num_elements: int, element_bytes: int) -> list[tuple[int, int]]:
    """The same for each message in which an object is sent."""
    return bounds(num_elements, element_bytes, MAX_MESSAGE_BYTES)


def bounds(num_elements: int, element_bytes: int, max_bytes: int) -> list[tuple[int, int]]:
    """The same for parts of at most ``max_bytes``."""
    step = max(1, max_bytes // element_bytes)
    return [(start, min(start + step, num_elements)) for start in range(0, num_elements, step)]


def groups_of_bounded_size(tensors: Sequence[tf.Tensor | tf.Variable], max_bytes: int | None = None) -> list[list[int]]:
    """The positions of tensors, in order, in groups of at most ``max_bytes`` (``PIECE_BYTES``) or of one tensor."""
    max_bytes = max_bytes or PIECE_BYTES
    groups: list[list[int]] = []
    filled = 0
    for i, size in enumerate(map(num_bytes, tensors)):
        if not groups or filled + size > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(i)
        filled += size
    return groups


def num_bytes(tensor: tf.Tensor | tf.Variable) -> int:
    """The size of a tensor; 0 if it is unknown when a function is compiled."""
    return (tensor.shape.num_elements() or 0) * tensor.dtype.size


def is_large(tensor: tf.Tensor | tf.Variable) -> bool:
    """Whether a tensor is reduced or broadcast in pieces."""
    return num_bytes(tensor) > PIECE_BYTES


def arrival(received: tf.Tensor) -> tf.Tensor:
    """A tensor for control dependencies: Horovod reduces inside a function, and one on its result would not wait for
    its end."""
    return tf.reshape(received, [-1])[:1]
