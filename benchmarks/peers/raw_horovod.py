"""Horovod as its examples write it: a tape, an allreduce for each gradient or for groups of them, a tf.function.

The settings of the environment that peers.py starts it with are those that were best for it on two ranks.
"""

import os

import horovod.tensorflow as hvd
import tensorflow as tf

hvd.init()
threads = max(1, len(os.sched_getaffinity(0)) // hvd.local_size())
tf.config.threading.set_intra_op_parallelism_threads(threads)
tf.config.threading.set_inter_op_parallelism_threads(threads)

from blocks import NETWORKS, measure
from gradient_tape import block_of, momentum_step


def reduce_each(gradients: list[tf.Tensor], weights: list[tf.Variable]) -> list[tf.Tensor]:
    return [hvd.allreduce(each, op=hvd.Average) for each in gradients]


def reduce_together(gradients: list[tf.Tensor], weights: list[tf.Variable]) -> list[tf.Tensor]:
    return hvd.grouped_allreduce(gradients, op=hvd.Average)


def barrier() -> None:
    hvd.allreduce(tf.zeros(1), name="barrier")


def most(value: int) -> int:
    return max(hvd.allgather_object(value))


blocks = {}
for name in NETWORKS:
    for kind, reduce in (("each", reduce_each), ("together", reduce_together)):
        for k in (1, 10):
            blocks[f"{name}, {k} a call, {kind}"] = block_of(momentum_step(name, reduce), k)
measure(blocks, barrier, most)
