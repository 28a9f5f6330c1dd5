"""A program's own Horovod operations in a compiled step, which ranks may leave out differently."""

import sys

import tensorflow as tf

from hvdtrain.distributed.collectives import Collectives

_UNNAMED = "Horovod"
"""How the names of operations begin to which a program gave none, after their scopes."""

_has_told = False


def tell_of_unnamed_operations(collectives: Collectives) -> None:
    """Says on rank 0, once, that the step that is being traced may never end.

    TensorFlow does not know that Horovod's operations communicate: it merges equal ones, and computes those of
    constants while it compiles, differently on each rank.
    """
    global _has_told
    if _has_told or tf.executing_eagerly() or collectives.size == 1:
        return
    operations = tf.compat.v1.get_default_graph().get_operations()
    unnamed = [each.name for each in operations if each.name.rpartition("/")[2].startswith(_UNNAMED)]
    if not unnamed:
        return
    _has_told = True
    if collectives.rank == 0:
        text = (
            "Horovod's operations in a step must have the same names on all ranks, or ranks may wait for each other "
            f"forever. Received: {unnamed[0]!r}, one of {len(unnamed)} without a name of the program's; those in the "
            "gradient of hvd.allgather never have one. Call hvdtrain.gather and hvdtrain.average instead."
        )
        print(f"hvdtrain: {text}", file=sys.stderr, flush=True)
