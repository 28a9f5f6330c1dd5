"""The checks of a model's own ``train_step``."""

from collections.abc import Callable
from typing import Any

import keras

from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.runtime import OnUnequal
from hvdtrain.optim.kept_batch import KeptBatch
from hvdtrain.optim.keras_calls import run_train_step
from hvdtrain.optim.pipeline import GradientPipeline, pipelines_of
from hvdtrain.training.equality.scheduled_check import ScheduledCheck
from hvdtrain.training.equality.step_check import StepCheck
from hvdtrain.training.losses import sums_over_batch

RunStep = Callable[[keras.Model, Callable[[Any], Any], Any], Any]
"""Receives a model, its ``train_step`` and the samples."""


def check_of_model(
    model: keras.Model,
    batches: KeptBatch,
    collectives: Collectives,
    *,
    on_unequal: OnUnequal,
    how_to_continue: str,
    report: Callable[[str], None],
    run: RunStep = run_train_step,
) -> ScheduledCheck | None:
    """The checks of a model's steps; None if its steps are not meant to be those of one process, or on one rank.

    Args:
        batches: keeps the batches of its steps.
        how_to_continue: what a user can do who wants to train nevertheless.
        report: receives, on rank 0, what users should know.
        run: runs its ``train_step``, as training does.
    """
    pipelines = pipelines_of(model)
    is_exact = bool(pipelines) and all(_is_exact(model, pipeline) for _, pipeline in pipelines)
    if on_unequal == "ignore" or collectives.size == 1 or collectives.may_change or not is_exact:
        return None

    def step_by(run: RunStep) -> Callable[[Any], Any]:
        return lambda data: run(model, model.train_step, data)

    check = StepCheck(step_by(run), model, collectives, unweighted=step_by(run_train_step))
    return ScheduledCheck(
        check, batches, collectives, on_unequal=on_unequal, how_to_continue=how_to_continue, report=report
    )


def _is_exact(model: keras.Model, pipeline: GradientPipeline) -> bool:
    """Whether updates are meant to be those of one process."""
    op = pipeline.reduce.config.op
    is_whole = op == "average" or (op == "sum" and sums_over_batch(model, op, gradient_accumulation_steps=1))
    return is_whole and not pipeline.reduce.local_variables()
