"""Overwrites variables with those of another rank, which are received in messages of bounded size."""

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from hvdtrain.distributed.bounded_messages import bounds, groups_of_bounded_size, num_bytes
from hvdtrain.errors import UsageError

Send = Callable[[tf.Tensor, str], tf.Tensor]
"""A broadcast: receives this rank's tensor and a name, and returns the root's tensor."""

PIECE_BYTES = 16 << 20
"""Size of a message: of several variables, or of a part of a larger one."""


def overwrite_with_received(variables: Sequence[tf.Variable], send: Send, *, is_root: bool) -> None:
    """Overwrites variables with what ``send`` returns for their values. All ranks must call it.

    In addition to the variables, a message is in memory, and, unless this is the root, two copies of the largest
    variable.

    Args:
        is_root: whether this rank is the one whose variables the others receive.

    Raises:
        UsageError: a variable holds strings.
    """
    for each in variables:
        if each.dtype == tf.string:
            raise UsageError(
                f"variables must hold numbers, or true and false, to be broadcast. Received: {each.name!r} of strings. "
                "Leave it out, and assign what hvdtrain.broadcast_object returns for its value."
            )
    for group in groups_of_bounded_size(variables, PIECE_BYTES):
        name = f"hvdtrain_broadcast_{group[0]}"
        if num_bytes(variables[group[0]]) > PIECE_BYTES:
            _overwrite_in_pieces(variables[group[0]], send, name, is_root=is_root)
        else:
            _overwrite_together([variables[i] for i in group], send, name, is_root=is_root)


def _overwrite_together(variables: Sequence[tf.Variable], send: Send, name: str, *, is_root: bool) -> None:
    """In one message. Not compiled: for 750 variables, that took ten seconds."""
    values = [np.asarray(each.numpy()) for each in variables]
    # As bytes: Horovod broadcasts neither bfloat16 nor uint32.
    own = np.concatenate([each.reshape(-1).view(np.uint8) for each in values])
    if not own.size:
        return
    with tf.device("CPU"):  # where the bytes are
        received = send(tf.constant(own), name).numpy()
    if is_root:
        return
    parts = np.split(received, np.cumsum([each.nbytes for each in values])[:-1])
    for variable, value, part in zip(variables, values, parts, strict=True):
        variable.assign(part.view(value.dtype).reshape(value.shape))


def _overwrite_in_pieces(variable: tf.Variable, send: Send, name: str, *, is_root: bool) -> None:
    """Not compiled, so that each piece is freed before the next one arrives.

    They are put together outside of TensorFlow: with oneDNN, it does not return memory to the system, and what it keeps
    after copies of unlike sizes is too scattered to be used again.
    """
    bytes_per_element = variable.dtype.size
    value = _aligned_bytes(0 if is_root else num_bytes(variable))
    with tf.device("CPU"):  # where Horovod sends from
        unused = tf.zeros(0 if is_root else min(PIECE_BYTES, num_bytes(variable)), tf.uint8)
    for start, end in bounds(variable.shape.num_elements(), bytes_per_element, PIECE_BYTES):
        place = slice(start * bytes_per_element, end * bytes_per_element)
        own = _bytes_of(variable, start, end) if is_root else None
        with tf.device("CPU"):
            received = send(unused[: place.stop - place.start] if own is None else own, f"{name}_piece_{start}")
        if not is_root:
            value[place] = received
    if not is_root:
        with tf.device("CPU"):
            received = _from_bytes(value, variable.dtype, variable.shape)
        variable.assign(received)


def _bytes_of(variable: tf.Variable, start: int, end: int) -> tf.Tensor:
    piece = tf.reshape(variable.value(), [-1])[start:end]
    return tf.cast(piece, tf.uint8) if piece.dtype == tf.bool else tf.reshape(tf.bitcast(piece, tf.uint8), [-1])


def _from_bytes(value: np.ndarray, dtype: tf.DType, shape: tf.TensorShape) -> tf.Tensor:
    """In TensorFlow's memory, in one copy; ``tf.convert_to_tensor`` would make two."""
    tensor = tf.experimental.dlpack.from_dlpack(value.__dlpack__())
    if dtype == tf.bool:
        return tf.reshape(tf.cast(tensor, tf.bool), shape)
    tensor = tf.bitcast(tf.reshape(tensor, [-1, dtype.size]), dtype)
    return tf.reshape(tf.raw_ops.DeepCopy(x=tensor), shape)


def _aligned_bytes(size: int) -> np.ndarray:
    """Memory at an address that TensorFlow accepts for a tensor; with others it aborts the process."""
    alignment = 64
    space = np.empty(size + alignment, np.uint8)
    start = -space.ctypes.data % alignment
    return space[start : start + size]
