"""Plain Keras on one rank: the compiled step of model.fit."""

from collections.abc import Callable

import keras
from blocks import NETWORK, measure
from endless_batches import endless_batches
from networks import NETWORKS, compiled


def block_of(steps_per_execution: int) -> Callable[[int], None]:
    model = compiled(NETWORKS[NETWORK][0](), keras.optimizers.SGD(1e-3, momentum=0.9))
    model.steps_per_execution = steps_per_execution
    model.make_train_function()
    batches = endless_batches(NETWORK, with_factor=False)

    def block(num_steps: int) -> None:
        for _ in range(num_steps // steps_per_execution):
            model.train_function(batches)

    return block


blocks = {f"{k} a call": block_of(k) for k in (1, 10)}
measure({"Keras": blocks}, lambda: None, lambda value: value)
