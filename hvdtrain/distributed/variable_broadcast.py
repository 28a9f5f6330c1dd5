"""Overwrites variables with those of another rank, which are received in messages of bounded size."""

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from hvdtrain.distributed.bounded_messages import groups_of_bounded_size, in_pieces, is_large, send_pieces
from hvdtrain.distributed.compiled import run_compiled

Send = Callable[[tf.Tensor, str], tf.Tensor]
"""A broadcast: receives this rank's tensor and a name, and returns the root's tensor."""


def overwrite_with_received(variables: Sequence[tf.Variable], send: Send, *, is_root: bool) -> None:
    """Overwrites variables with what ``send`` returns for their values. All ranks must call it.

    In addition to the variables, a few messages of at most ``PIECE_BYTES`` are in memory, and, unless this is the root,
    the largest variable.

    Args:
        is_root: whether this rank is the one whose variables the others receive.
    """
    for group in groups_of_bounded_size(variables):
        name = f"hvdtrain_broadcast_{group[0]}"
        if is_large(variables[group[0]]):
            _overwrite_in_pieces(variables[group[0]], send, name, is_root=is_root)
        else:
            _overwrite_together([variables[i] for i in group], send, name, is_root=is_root)


def _overwrite_together(variables: Sequence[tf.Variable], send: Send, name: str, *, is_root: bool) -> None:
    """By one message. Not compiled: for 750 variables, that took ten seconds."""
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
    def send_piece(piece: tf.Tensor, suffix: str) -> tf.Tensor:
        return send(piece, f"{name}{suffix}")

    def overwrite() -> tf.Tensor | None:
        is_bool = variable.dtype == tf.bool
        own = variable.value() if is_bool else tf.bitcast(variable.value(), tf.uint8)
        if is_root:
            return send_pieces(own, send_piece)
        received = in_pieces(own, send_piece)
        variable.assign(received if is_bool else tf.bitcast(received, variable.dtype), read_value=False)
        return None

    run_compiled(overwrite)
