"""Plain Keras on one rank: the compiled step of model.fit."""

import os
from collections.abc import Callable

import keras
import tensorflow as tf
from blocks import measure
from networks import NETWORKS, compiled, endless_batches

threads = max(1, len(os.sched_getaffinity(0)) // int(os.environ["SHARES"]))
tf.config.threading.set_intra_op_parallelism_threads(threads)
tf.config.threading.set_inter_op_parallelism_threads(threads)


def block_of(name: str, steps_per_call: int) -> Callable[[int], None]:
    model = compiled(NETWORKS[name][0](), keras.optimizers.SGD(1e-3, momentum=0.9))
    model.steps_per_execution = steps_per_call
    model.make_train_function()
    batches = endless_batches(name, with_factor=False)

    def block(num_steps: int) -> None:
        for _ in range(num_steps // steps_per_call):
            model.train_function(batches)

    return block


blocks = {f"{name}, {k} a call": block_of(name, k) for name in NETWORKS for k in (1, 10)}
measure(blocks, lambda: None, lambda value: value)
