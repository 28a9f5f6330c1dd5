"""The compiled step that Trainer runs, by itself; after hvdtrain.init()."""

import keras
import tensorflow as tf
from networks import NETWORKS, compiled, endless_batches

import hvdtrain
from hvdtrain.gradient_watch import GradientWatch
from hvdtrain.steps import CompiledSteps
from hvdtrain.timing.step_times import StepTimes


def trainer_steps(
    name: str, steps_per_call: int, *, jit_compile: bool = False
) -> tuple[CompiledSteps, tf.data.Iterator]:
    """Distributed optimizer, NaN guard, gradient norm and times; and batches for it."""
    # A batch of texts uses most of the rows of the table, and some of them often.
    optimizer = hvdtrain.DistributedOptimizer(keras.optimizers.SGD(1e-3, momentum=0.9), sparse_as_dense=True)
    model = compiled(NETWORKS[name][0](), optimizer)
    model.optimizer.build(model.trainable_variables)
    times = StepTimes(1)
    watch = GradientWatch(model.optimizer, times, on_nan="stop")
    watch.build(model.trainable_variables)
    steps = CompiledSteps(
        model, steps_per_call=steps_per_call, times=times, watch=watch, weighted=False, jit_compile=jit_compile
    )
    return steps, endless_batches(name)
