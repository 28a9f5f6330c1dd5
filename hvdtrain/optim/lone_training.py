"""Models that each rank would train alone: those whose optimizer is not distributed."""

import sys
import weakref
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.distributed import runtime
from hvdtrain.distributed.model_roles import is_averaged, is_replicated
from hvdtrain.distributed.shards import has_tables
from hvdtrain.errors import UsageError

_told: "weakref.WeakSet[keras.Model]" = weakref.WeakSet()


def run_guarded(model: keras.Model, train_step: Callable[[Any], Any], data: Any) -> Any:
    """Runs or traces the ``train_step`` of a model without a distributed optimizer.

    Raises:
        UsageError: several ranks have the same model, and the step reduces nothing over them.
    """
    result = train_step(data)
    if has_tables(model):
        raise UsageError(
            "a model with sharded tables must be trained by all ranks together: its optimizer must be distributed. "
            f"Received: {model.name!r} with {getattr(model.optimizer, 'name', None)}. Pass "
            "hvdtrain.DistributedOptimizer(optimizer) to model.compile."
        )
    if tf.executing_eagerly() or runtime.collectives().size == 1 or is_averaged(model) or _communicates():
        return result
    name = getattr(model.optimizer, "name", None)
    text = (
        "each rank would train this model alone: its optimizer must be distributed. Received: "
        f"{model.name!r} with {name}. Pass hvdtrain.DistributedOptimizer(optimizer) to each model.compile"
    )
    if is_replicated(model) and runtime.on_unequal() == "stop":
        raise UsageError(f"{text}, also to that of fine-tuning.")
    if runtime.collectives().rank == 0 and model not in _told:
        _told.add(model)
        print(f"hvdtrain: {text}, unless it is meant to.", file=sys.stderr, flush=True)
    return result


def _communicates() -> bool:
    """Whether the step that is traced calls Horovod, as with a DistributedGradientTape."""
    operations = tf.compat.v1.get_default_graph().get_operations()
    return any(operation.type.startswith("Horovod") for operation in operations)
