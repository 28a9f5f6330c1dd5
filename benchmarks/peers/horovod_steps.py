"""hvdtrain's step and raw Horovod's, written as in its examples, in one job and thus under the same conditions.

Horovod: a tape, an allreduce per gradient or one for all, a tf.function, and the settings that hvdtrain chose for the
job.
"""

import os

import hvdtrain

hvdtrain.init(seed=0, threads=int(os.environ["THREADS"]))

import horovod.tensorflow as hvd
import tensorflow as tf
from blocks import NETWORK
from gradient_tape import block_of, momentum_step
from horovod_job import measure_ranks, trainer_blocks


def reduce_each(gradients: list[tf.Tensor], weights: list[tf.Variable]) -> list[tf.Tensor]:
    return [hvd.allreduce(each, op=hvd.Average) for each in gradients]


def reduce_together(gradients: list[tf.Tensor], weights: list[tf.Variable]) -> list[tf.Tensor]:
    return hvd.grouped_allreduce(gradients, op=hvd.Average)


peers = {"hvdtrain": trainer_blocks()}
# On a single rank raw Horovod would still call its allreduce.
if hvd.size() > 1:
    peers["raw Horovod, tuned"] = {
        f"{k} a call, {kind}": block_of(momentum_step(NETWORK, reduce), k)
        for k in (1, 10)
        for kind, reduce in (("each", reduce_each), ("together", reduce_together))
    }
measure_ranks(peers)
