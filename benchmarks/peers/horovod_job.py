"""Blocks and turns of a job under Horovod. Requires hvdtrain.init()."""

import horovod.tensorflow as hvd
import tensorflow as tf
from blocks import NETWORK, Block, measure, pause_between_turns
from trainer_steps import trainer_steps


def trainer_blocks(*, jit_compile: bool = False) -> dict[str, Block]:
    """The step of hvdtrain's Trainer, with NaN guard and timing, with one and ten steps per call."""
    return {f"{k} a call": _block(k, jit_compile) for k in (1, 10)}


def _block(steps_per_execution: int, jit_compile: bool) -> Block:
    train_step = trainer_steps(NETWORK, steps_per_execution, jit_compile=jit_compile)

    def block(num_steps: int) -> None:
        for _ in range(num_steps // steps_per_execution):
            train_step.run(steps_per_execution)

    return block


def measure_ranks(peers: dict[str, dict[str, Block]]) -> None:
    """Runs the blocks of all peers on every rank in this job's turns."""
    if hvd.size() > 1:
        # Horovod's background threads poll continuously.
        pause_between_turns()
    over = ", Gloo" if hvd.gloo_enabled() else ""
    measure(
        {peer: {case + over: block for case, block in cases.items()} for peer, cases in peers.items()},
        _barrier,
        _maximum,
    )


def _barrier() -> None:
    hvd.allreduce(tf.zeros(1), name="barrier")


def _maximum(value: int) -> int:
    return max(hvd.allgather_object(value))
