"""What a job of ranks under Horovod measures, and how it takes its turns; after hvdtrain.init()."""

import horovod.tensorflow as hvd
import tensorflow as tf
from blocks import NETWORK, Block, measure, stand_still_between_turns
from trainer_steps import trainer_steps


def trainer_blocks(*, jit_compile: bool = False) -> dict[str, Block]:
    """The step that hvdtrain's Trainer runs, with the guard against NaN and the times of steps: one and ten a call."""
    return {f"{k} a call": _block(k, jit_compile) for k in (1, 10)}


def _block(steps_per_call: int, jit_compile: bool) -> Block:
    steps, batches = trainer_steps(NETWORK, steps_per_call, jit_compile=jit_compile)

    def block(num_steps: int) -> None:
        for _ in range(num_steps // steps_per_call):
            steps.train(batches, steps_per_call)

    return block


def measure_ranks(peers: dict[str, dict[str, Block]]) -> None:
    """Makes the blocks of all peers on every rank, whenever it is this job's turn."""
    if hvd.size() > 1:
        # Horovod's threads ask each other for work all the time.
        stand_still_between_turns()
    measure(peers, _barrier, _most)


def _barrier() -> None:
    hvd.allreduce(tf.zeros(1), name="barrier")


def _most(value: int) -> int:
    return max(hvd.allgather_object(value))
