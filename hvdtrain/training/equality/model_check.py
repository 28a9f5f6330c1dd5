"""The checks of a model's own ``train_step``."""

import functools
from collections.abc import Callable
from typing import Any

import keras

from hvdtrain.config.wording import option
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.runtime import OnUnequal
from hvdtrain.optim.kept_batch import KeptBatch
from hvdtrain.optim.keras_calls import run_weighted_train_step
from hvdtrain.optim.only_checks import end_if_only_checking
from hvdtrain.optim.pipeline import pipelines_of
from hvdtrain.training.equality.sample_guard import SampleGuard
from hvdtrain.training.equality.scheduled_check import ScheduledCheck
from hvdtrain.training.equality.step_check import StepCheck
from hvdtrain.training.losses import sums_over_batch


def check_of_model(
    model: keras.Model,
    batches: KeptBatch,
    collectives: Collectives,
    *,
    on_unequal: OnUnequal,
    how_to_continue: str,
    report: Callable[[str], None],
    weighs_micro_batches: bool,
) -> ScheduledCheck | None:
    """The checks of a model's steps; None if its steps are not meant to be those of one process, or on one rank.

    Args:
        on_unequal: with ``ignore``, only the samples of the ranks are compared.
        batches: keeps the batches of its steps.
        how_to_continue: what a user can do who wants to train nevertheless.
        report: receives, on rank 0, what users should know.
        weighs_micro_batches: whether ranks count by their samples also with gradient accumulation.
    """
    if (reason := _why_unchecked(model, collectives)) is not None:
        end_if_only_checking(reason, collectives)
        return None
    if on_unequal == "ignore":
        end_if_only_checking(option("on_unequal", "ignore"), collectives)

    def step(data: Any, *, is_weighted_later: bool = False) -> Any:
        return run_weighted_train_step(
            model, model.train_step, data, is_update=weighs_micro_batches, is_weighted_later=is_weighted_later
        )

    unweighted = functools.partial(step, is_weighted_later=True)
    ignores = on_unequal == "ignore"
    check = SampleGuard(collectives) if ignores else StepCheck(step, model, collectives, unweighted=unweighted)
    return ScheduledCheck(
        check, batches, collectives, on_unequal=on_unequal, how_to_continue=how_to_continue, report=report
    )


def _why_unchecked(model: keras.Model, collectives: Collectives) -> str | None:
    """Why the updates of a model cannot be compared with those of one process; None if they can."""
    if collectives.size == 1 and not collectives.may_change:
        return "there is one rank"
    pipelines = pipelines_of(model)
    if not pipelines:
        return "no optimizer is distributed"
    for _, pipeline in pipelines:
        op = pipeline.reduce.config.op
        if op == "adasum" or (op == "sum" and not sums_over_batch(model, op, gradient_accumulation_steps=1)):
            return f"op={op!r} makes other updates of losses that are means"
        if pipeline.reduce.local_variables():
            return "each rank trains its own layers"
    return None
