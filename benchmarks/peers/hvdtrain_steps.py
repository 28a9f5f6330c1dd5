"""hvdtrain: the step that its Trainer runs, with the guard against NaN and the times of steps."""

from collections.abc import Callable

import hvdtrain

hvdtrain.init(seed=0)

import keras
from blocks import measure
from networks import NETWORKS, compiled, endless_batches

from hvdtrain import runtime
from hvdtrain.gradient_watch import GradientWatch
from hvdtrain.steps import CompiledSteps
from hvdtrain.timing.step_times import StepTimes


def block_of(name: str, steps_per_call: int) -> Callable[[int], None]:
    model = compiled(NETWORKS[name][0](), hvdtrain.DistributedOptimizer(keras.optimizers.SGD(1e-3, momentum=0.9)))
    model.optimizer.build(model.trainable_variables)
    times = StepTimes(1)
    watch = GradientWatch(model.optimizer, times, on_nan="stop")
    watch.build(model.trainable_variables)
    steps = CompiledSteps(model, steps_per_call=steps_per_call, times=times, watch=watch, weighted=False)
    batches = endless_batches(name)

    def block(num_steps: int) -> None:
        for _ in range(num_steps // steps_per_call):
            steps.train(batches, steps_per_call)

    return block


collectives = runtime.current().collectives
blocks = {f"{name}, {k} a call": block_of(name, k) for name in NETWORKS for k in (1, 10)}
measure(blocks, collectives.barrier, lambda value: max(collectives.allgather(value)))
