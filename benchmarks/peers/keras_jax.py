"""Keras on JAX with keras.distribution.DataParallel, a process per rank; in an environment with jax and keras only."""

import itertools
import os

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np
from blocks import NETWORK, Block, measure
from jax.experimental import multihost_utils
from networks import NETWORKS, compiled
from samples import batch

if SIZE > 1:
    keras.distribution.initialize(f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", SIZE, RANK)
distribution = keras.distribution.DataParallel(auto_shard_dataset=False)
keras.distribution.set_distribution(distribution)


def block_of(steps_per_execution: int) -> Block:
    model = compiled(NETWORKS[NETWORK][0](), keras.optimizers.SGD(1e-3, momentum=0.9), jit_compile=True)
    model.steps_per_execution = steps_per_execution
    # Builds the model's state and its compiled step.
    model.fit(*batch(NETWORK), batch_size=len(batch(NETWORK)[0]), verbose=0)
    layout = distribution.get_data_layout
    batches = itertools.repeat(
        tuple(
            jax.make_array_from_process_local_data(layout(each.shape).backend_layout, each) for each in batch(NETWORK)
        )
    )
    state = tuple(
        [variable.value for variable in variables]
        for variables in (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )
    )

    def block(num_steps: int) -> None:
        nonlocal state
        for _ in range(num_steps // steps_per_execution):
            _, state = model.train_function(state, batches)
        jax.block_until_ready(state)

    return block


def barrier() -> None:
    multihost_utils.sync_global_devices("barrier")


def maximum(value: int) -> int:
    return int(np.max(multihost_utils.process_allgather(np.int32(value))))


blocks = {f"{k} a call": block_of(k) for k in (1, 10)}
measure({"Keras on JAX": blocks}, barrier, maximum)
