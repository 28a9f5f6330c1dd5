"""Overwrites variables with those of another rank, which are received in bounded pieces."""

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from hvdtrain.distributed.bounded_messages import blocks, groups_of_bounded_size, num_bytes
from hvdtrain.distributed.compiled import compiled


def overwrite_with_received(
    variables: Sequence[tf.Variable], send: Callable[[tf.Tensor, str], tf.Tensor], *, is_root: bool
) -> None:
    """Overwrites variables with what ``send`` returns for their values. All ranks must call it.

    At most the larger of a variable and ``PIECE_BYTES`` is in memory twice.

    Args:
        send: a broadcast: receives this rank's tensor and a name, and returns the root's tensor.
        is_root: whether this rank is the one whose variables the others receive.
    """
    cuts = [list(blocks(each.shape, each.dtype.size)) for each in variables]
    whole = [i for i, indices in enumerate(cuts) if indices == [()]]

    def overwrite() -> None:
        last: list[tf.Operation] = []
        for group in groups_of_bounded_size(num_bytes(variables[i]) for i in whole):
            with tf.control_dependencies(last):
                last = []
                for i in (whole[j] for j in group):
                    received = send(variables[i].value(), f"hvdtrain_broadcast_{i}")
                    last.append(variables[i].assign(received, read_value=False))

    compiled(overwrite)()
    for variable, indices in zip(variables, cuts, strict=True):
        if indices != [()]:
            _overwrite_in_blocks(variable, indices, send, is_root=is_root)


def _overwrite_in_blocks(
    variable: tf.Variable,
    indices: Sequence[tuple[slice, ...]],
    send: Callable[[tf.Tensor, str], tf.Tensor],
    *,
    is_root: bool,
) -> None:
    # Written into the variable block by block, TensorFlow would copy it at each later read.
    together = None if is_root else np.empty(variable.shape, variable.dtype.as_numpy_dtype)
    for block in indices:
        received = send(variable.value()[block], "hvdtrain_broadcast_block")
        if together is not None:
            together[block] = received.numpy()
    if together is not None:
        variable.assign(together)
