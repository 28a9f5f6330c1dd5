"""hvdtrain: the step that its Trainer runs, with the guard against NaN and the times of steps."""

from collections.abc import Callable

import hvdtrain

hvdtrain.init(seed=0)

from blocks import NETWORKS, measure
from trainer_steps import trainer_steps

from hvdtrain import runtime


def block_of(name: str, steps_per_call: int) -> Callable[[int], None]:
    steps, batches = trainer_steps(name, steps_per_call)

    def block(num_steps: int) -> None:
        for _ in range(num_steps // steps_per_call):
            steps.train(batches, steps_per_call)

    return block


collectives = runtime.current().collectives
blocks = {f"{name}, {k} a call": block_of(name, k) for name in NETWORKS for k in (1, 10)}
measure(blocks, collectives.barrier, lambda value: max(collectives.allgather(value)))
