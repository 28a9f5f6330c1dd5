"""Blocks of the step that hvdtrain's Trainer runs, in one job of several ranks; after hvdtrain.init()."""

from collections.abc import Callable

import horovod.tensorflow as hvd
import tensorflow as tf
from blocks import NETWORK
from trainer_steps import trainer_steps


def trainer_blocks(*, jit_compile: bool = False) -> dict[str, Callable[[int], None]]:
    """With the guard against NaN and the times of steps; one and ten steps a call."""
    return {f"{k} a call": _block(k, jit_compile) for k in (1, 10)}


def _block(steps_per_call: int, jit_compile: bool) -> Callable[[int], None]:
    steps, batches = trainer_steps(NETWORK, steps_per_call, jit_compile=jit_compile)

    def block(num_steps: int) -> None:
        for _ in range(num_steps // steps_per_call):
            steps.train(batches, steps_per_call)

    return block


def barrier() -> None:
    hvd.allreduce(tf.zeros(1), name="barrier")


def most(value: int) -> int:
    return max(hvd.allgather_object(value))
