"""``rescale=True``: the global batch follows the number of ranks, so that steps do not determine the data position."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import keras

from hvdtrain.data.sample_plan import SamplePlan
from hvdtrain.distributed.optimizers import leaves_of
from hvdtrain.optim.learning_rate import scaled_learning_rate


def place_in_data(plan: SamplePlan, step: int) -> dict[str, int]:
    """What a checkpoint keeps of the place in the data after a number of steps."""
    position = plan.position(step)
    return {"sample": position.epoch * plan.num_samples + position.sample}


def continued_plan(plan: SamplePlan, step: int, place: Mapping[str, Any]) -> SamplePlan:
    """A plan that begins after a number of steps, at the place that :func:`place_in_data` returned."""
    return dataclasses.replace(plan, first_step=step, first_sample=place["sample"])


def rescale_learning_rate(model: keras.Model, scaling: str, *, ranks_before: int, ranks: int) -> None:
    """Scales the current learning rate, which a callback may have set, to a different number of ranks.

    Args:
        scaling: how it depends on the number of ranks; see
            :func:`~hvdtrain.optim.learning_rate.scaled_learning_rate`.
    """
    if scaling == "none":
        return
    factor = scaled_learning_rate(1.0, scaling, ranks) / scaled_learning_rate(1.0, scaling, ranks_before)
    for optimizer in leaves_of(model):
        optimizer.learning_rate = float(optimizer.learning_rate) * factor
