"""Overwrites variables with those of another rank, which are received in bounded pieces."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from hvdtrain.distributed.bounded_messages import groups_of_bounded_size, in_pieces, send_pieces
from hvdtrain.distributed.compiled import compiled


def overwrite_with_received(
    variables: Sequence[tf.Variable], send: Callable[[tf.Tensor, str], tf.Tensor], *, is_root: bool
) -> None:
    """Overwrites variables with what ``send`` returns for their values. All ranks must call it.

    At most the larger of one variable and ``PIECE_BYTES`` is in memory twice; on the root only pieces are.

    Args:
        send: a broadcast: receives this rank's tensor and a name, and returns the root's tensor.
        is_root: whether this rank is the one whose variables the others receive.
    """

    def overwrite() -> list[tf.Tensor]:
        last: list[tf.Operation | tf.Tensor] = []
        sent: list[tf.Tensor] = []
        for group in groups_of_bounded_size(variables):
            with tf.control_dependencies(last):
                last = [overwrite_one(i, variables[i]) for i in group]
            sent += [each for each in last if isinstance(each, tf.Tensor)]
        return sent

    def overwrite_one(i: int, variable: tf.Variable) -> tf.Operation | tf.Tensor:
        # As bytes: Horovod broadcasts neither bfloat16 nor uint32.
        is_bool = variable.dtype == tf.bool
        own = variable.value() if is_bool else tf.bitcast(variable.value(), tf.uint8)

        def send_piece(piece: tf.Tensor, suffix: str) -> tf.Tensor:
            return send(piece, f"hvdtrain_broadcast_{i}{suffix}")

        if is_root:
            return send_pieces(own, send_piece)
        received = in_pieces(own, send_piece)
        return variable.assign(received if is_bool else tf.bitcast(received, variable.dtype), read_value=False)

    compiled(overwrite)()
