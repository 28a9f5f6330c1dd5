"""Refuses a ``model.fit`` for which ranks have different arguments: they would hang, or train differently."""

from collections.abc import Mapping
from typing import Any

import keras

from hvdtrain.distributed.agreement import require_agreement
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.descriptions import described
from hvdtrain.seams import keras_internals

_REMEDY = (
    "Start every rank with the same code, and compute arguments from what all ranks have in common: class weights, for "
    "example, from all labels, before hvdtrain.shard."
)


def require_equal_programs(model: keras.Model, arguments: Mapping[str, Any], collectives: Collectives) -> None:
    """Compares, before ``model.fit``, its arguments and those of ``compile``. All ranks must call it.

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
        **_metric_facts(model),
    }
    require_agreement("arguments of model.fit and compile", facts, collectives, remedy=_REMEDY)


def _metric_facts(model: keras.Model) -> dict[str, Any]:
    compiled = keras_internals.COMPILED_METRICS.of(model)
    if compiled is None:
        return {}
    return {
        "metrics": described(keras_internals.USER_METRICS.of(compiled)),
        "weighted_metrics": described(keras_internals.USER_WEIGHTED_METRICS.of(compiled)),
    }
