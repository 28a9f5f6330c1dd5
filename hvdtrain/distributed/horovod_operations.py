"""Horovod's operations on tensors of any size and float dtype, over all ranks or those of a process set."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.distributed import bounded_messages

_HALVES = (tf.bfloat16, tf.float16)


class HorovodOperations:
    """Calls Horovod with names that are the same on every rank.

    Args:
        hvd: the module ``horovod.tensorflow``, initialized.
        process_set: the ranks that take part; None: all.
    """

    def __init__(self, hvd: Any, process_set: Any = None):
        self.hvd = hvd
        # As they are now: a check replaces Horovod's functions by those of one process, for the program that it checks.
        # What hvdtrain itself sends then, such as the rows of sharded tables, passes between all ranks.
        self._allreduce, self._alltoall = hvd.allreduce, hvd.alltoall
        # TensorFlow's scopes hold the names of optimizers, which Keras numbers: a rank that has made another optimizer
        # before would wait for the others forever.
        self._options: dict[str, Any] = {"ignore_name_scope": True}
        if process_set is not None:
            self._options["process_set"] = process_set
        self._num_reductions = 0

    def next_reduction_name(self) -> str:
        """A name for the reductions of one optimizer, by the order in which ranks ask for it."""
        self._num_reductions += 1
        return f"hvdtrain_gradients_{self._num_reductions}"

    def allreduce(self, tensor: tf.Tensor, op: Any, name: str, *, in_half: bool = False) -> tf.Tensor:
        """An allreduce of a tensor of any size and float dtype.

        Horovod does not know bfloat16, and a sum of float16 overflows with few ranks: both are summed in float32.

        Args:
            op: one of Horovod's, such as ``hvd.Sum``.
            in_half: the sum of float16 cannot overflow: send and sum it in float16.
        """

        def send(piece: tf.Tensor, suffix: str) -> tf.Tensor:
            sent = tf.cast(piece, tf.float32) if piece.dtype in _HALVES and not in_half else piece
            return tf.cast(self._allreduce(sent, op=op, name=name + suffix, **self._options), piece.dtype)

        return bounded_messages.in_pieces(tensor, send)

    def allreduce_unnamed(self, tensor: tf.Tensor, op: Any) -> tf.Tensor:
        """An allreduce in one message, which Horovod names after the tensor."""
        return self.hvd.allreduce(tensor, op=op, **self._options)

    def sum_together(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The sums of tensors of one dtype, in one message."""
        dtype = tensors[0].dtype
        sent = [tf.cast(each, tf.float32) if dtype in _HALVES else each for each in tensors]
        return [tf.cast(each, dtype) for each in self.hvd.grouped_allreduce(sent, op=self.hvd.Sum, **self._options)]

    def allgather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """The tensors of all ranks, concatenated along the first dimension."""
        return self.hvd.allgather(tensor, name=name, **self._options)

    def alltoall(self, tensor: tf.Tensor, lengths: tf.Tensor, name: str) -> tuple[tf.Tensor, tf.Tensor]:
        """Sends ``lengths[i]`` rows to rank i; returns the rows from all ranks, and their numbers."""
        return self._alltoall(tensor, lengths, name=name, **self._options)

    def broadcast(self, tensor: tf.Tensor, root_rank: int, name: str) -> tf.Tensor:
        """The tensor of the rank with this number among all ranks."""
        return self.hvd.broadcast(tensor, root_rank, name=name, **self._options)
