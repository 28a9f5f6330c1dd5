"""Refuses a ``model.fit`` for which ranks have different arguments or optimizers: they would wait, or diverge."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import keras

from hvdtrain.distributed.agreement import require_agreement
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.descriptions import configuration, described
from hvdtrain.distributed.optimizers import leaves_of
from hvdtrain.optim.pipeline import pipelines_of
from hvdtrain.seams import keras_internals

_REMEDY = (
    "Start every rank with the same code, and compute arguments from what all ranks have in common: class weights, for "
    "example, from all labels, before hvdtrain.shard."
)


def require_equal_programs(model: keras.Model, arguments: Mapping[str, Any], collectives: Collectives) -> None:
    """Compares, before ``model.fit``, its arguments and those of the optimizers. All ranks must call it.

    Learning rates are compared after each epoch instead: those of rank 0 may be broadcast when training begins.

    Args:
        arguments: of ``model.fit``.

    Raises:
        DisagreementError: on every rank, if they differ.
    """
    facts = {
        "epochs": arguments.get("epochs", 1),
        "initial_epoch": arguments.get("initial_epoch", 0),
        "class_weight": described(arguments.get("class_weight")),
        "steps_per_execution": model.steps_per_execution,
        "run_eagerly": model.run_eagerly,
        "dtype policies": sorted({layer.dtype_policy.name for layer in keras_internals.FLATTEN_LAYERS.of(model)()}),
        **optimizer_facts(model),
        **_metric_facts(model),
    }
    require_agreement("arguments of model.fit, compile and the optimizer", facts, collectives, remedy=_REMEDY)


def optimizer_facts(model: keras.Model) -> dict[str, Any]:
    """The arguments of a model's optimizers, except for learning rates."""
    facts: dict[str, Any] = {}
    leaves = leaves_of(model)
    for number, leaf in enumerate(leaves):
        name = type(leaf).__name__ + (f" {number}" if len(leaves) > 1 else "")
        facts[f"optimizer {number}"] = type(leaf).__name__
        for key, value in configuration(leaf).items():
            if key != "learning_rate":
                facts[f"{key} of {name}"] = value
    for number, (_, pipeline) in enumerate(pipelines_of(model)):
        reduction = dataclasses.asdict(pipeline.reduce.config)
        facts |= {f"{key} of DistributedOptimizer {number}": value for key, value in reduction.items()}
    return facts


def _metric_facts(model: keras.Model) -> dict[str, Any]:
    compiled = keras_internals.COMPILED_METRICS.of(model)
    if compiled is None:
        return {}
    return {
        "metrics": described(keras_internals.USER_METRICS.of(compiled)),
        "weighted_metrics": described(keras_internals.USER_WEIGHTED_METRICS.of(compiled)),
    }
