"""hvdtrain's step and Horovod's as its examples write it, in one job: both get the same of the machine.

hvdtrain: the step that its Trainer runs, with the guard against NaN and the times of steps. Horovod: a tape, an
allreduce for each gradient or one for all, a tf.function, and the settings that hvdtrain has chosen for the job.
"""

from collections.abc import Callable

import hvdtrain

hvdtrain.init(seed=0)

import horovod.tensorflow as hvd
import tensorflow as tf
from blocks import NETWORK, measure, stand_still_between_turns
from gradient_tape import block_of, momentum_step
from trainer_steps import trainer_steps


def trainer_block(steps_per_call: int, *, jit_compile: bool = False) -> Callable[[int], None]:
    steps, batches = trainer_steps(NETWORK, steps_per_call, jit_compile=jit_compile)

    def block(num_steps: int) -> None:
        for _ in range(num_steps // steps_per_call):
            steps.train(batches, steps_per_call)

    return block


def reduce_each(gradients: list[tf.Tensor], weights: list[tf.Variable]) -> list[tf.Tensor]:
    return [hvd.allreduce(each, op=hvd.Average) for each in gradients]


def reduce_together(gradients: list[tf.Tensor], weights: list[tf.Variable]) -> list[tf.Tensor]:
    return hvd.grouped_allreduce(gradients, op=hvd.Average)


def barrier() -> None:
    hvd.allreduce(tf.zeros(1), name="barrier")


def most(value: int) -> int:
    return max(hvd.allgather_object(value))


peers = {
    "hvdtrain": {f"{k} a call": trainer_block(k) for k in (1, 10)},
    "hvdtrain --jit-compile": {f"{k} a call": trainer_block(k, jit_compile=True) for k in (1, 10)},
}
# A single rank has nothing to reduce, which raw Horovod does not know.
if hvd.size() > 1:
    peers["raw Horovod, tuned"] = {
        f"{k} a call, {kind}": block_of(momentum_step(NETWORK, reduce), k)
        for k in (1, 10)
        for kind, reduce in (("each", reduce_each), ("together", reduce_together))
    }
    # Horovod's threads ask each other for work all the time.
    stand_still_between_turns()
measure(peers, barrier, most)
