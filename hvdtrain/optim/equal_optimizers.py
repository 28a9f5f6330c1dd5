"""Refuses ranks whose optimizers have different arguments: equal gradients would update their replicas differently."""

import dataclasses
from typing import Any

import keras

from hvdtrain.distributed.agreement import require_agreement
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.config import ReductionConfig
from hvdtrain.distributed.descriptions import configuration


def require_equal_optimizers(
    optimizer: keras.optimizers.Optimizer, reduction: ReductionConfig, collectives: Collectives
) -> None:
    """Compares the arguments of an optimizer, except for its learning rate. All ranks must call it, outside of steps.

    Learning rates are compared later: those of rank 0 may be broadcast when training begins.

    Raises:
        DisagreementError: on every rank, if they differ.
    """
    facts: dict[str, Any] = {"optimizer": type(optimizer).__name__, **dataclasses.asdict(reduction)}
    facts |= {key: value for key, value in configuration(optimizer).items() if key != "learning_rate"}
    require_agreement(
        "arguments of the optimizer", facts, collectives, remedy="Build it from what all ranks have in common."
    )
