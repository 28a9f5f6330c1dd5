"""Trainer's compiled step without the Trainer. Requires hvdtrain.init()."""

import time
from types import SimpleNamespace

import keras
from endless_batches import endless_batches
from networks import NETWORKS, compiled

import hvdtrain
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.training.config import StepConfig
from hvdtrain.training.gradient_record import GradientRecord
from hvdtrain.training.step_times import StepTimes
from hvdtrain.training.train_step import LossWeights, TrainStep


def trainer_steps(
    name: str,
    steps_per_execution: int,
    *,
    jit_compile: bool = False,
    groups: int | None = None,
    collectives: Collectives | None = None,
) -> TrainStep:
    """A step with distributed optimizer, NaN guard, gradient norm and timing, on an endless feed of one batch."""
    optimizer = hvdtrain.DistributedOptimizer(
        keras.optimizers.SGD(1e-3, momentum=0.9),
        groups=groups,
        # A batch of texts uses most rows of the embedding, some repeatedly.
        sparse_as_dense=True,
        collectives=collectives,
    )
    model = compiled(NETWORKS[name][0](), optimizer)
    model.optimizer.build(model.trainable_variables)
    times = StepTimes(1)
    record = GradientRecord(1)
    record.build(model.trainable_variables)
    return TrainStep(
        model,
        SimpleNamespace(iterator=endless_batches(name)),
        StepConfig(steps_per_execution=steps_per_execution, jit_compile=jit_compile),
        times=times,
        record=record,
        weights=LossWeights(is_weighted=False, has_fillers=False, leaves_out_samples=False, loss_sums=False),
    )


def step_ms(train_step: TrainStep, num_steps: int) -> float:
    """Makes at least ``num_steps`` steps and returns the time per step."""
    began_s = time.perf_counter()
    done = 0
    while done < num_steps:
        train_step.run(train_step.max_steps)
        done += train_step.max_steps
    return 1000 * (time.perf_counter() - began_s) / done
