"""Adasum: averages gradients that agree and adds those that are orthogonal (Maleki et al., arXiv:2006.02924)."""

from collections.abc import Sequence

import tensorflow as tf

from hvdtrain.distributed import bounded_messages
from hvdtrain.distributed.gradient_reduction import Gradient, GradientReducer, ReducedGradients
from hvdtrain.distributed.horovod_operations import HorovodOperations
from hvdtrain.errors import UsageError


def adasum_reducer(operations: HorovodOperations, num_ranks: int) -> GradientReducer:
    """A function that combines the gradients of a step by Adasum; it works inside a tf.function.

    Raises:
        UsageError: the number of ranks is not a power of 2, or the job does not use MPI.
    """
    if num_ranks & (num_ranks - 1):
        raise UsageError(
            f"op='adasum' needs a number of ranks that is a power of 2. Received: {num_ranks}. Use op='average'."
        )
    if not operations.hvd.mpi_enabled():
        raise UsageError("op='adasum' needs MPI. This job runs over Gloo: launch with mpirun, or horovodrun --mpi.")

    def reduce(gradients: Sequence[Gradient]) -> ReducedGradients:
        # One by one: Adasum uses the angle between two ranks' gradients of each variable.
        tensors = list(map(tf.convert_to_tensor, gradients))
        if any(bounded_messages.num_bytes(each) > bounded_messages.MAX_MESSAGE_BYTES for each in tensors):
            raise UsageError("op='adasum' needs gradients of at most 1 GiB. Use op='average' or local_layers.")
        reduced = [operations.allreduce_unnamed(each, operations.hvd.Adasum) for each in tensors]
        return ReducedGradients(tensors, reduced, list)

    return reduce
