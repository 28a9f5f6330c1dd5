"""Traces a model's ``train_step`` without running it: it creates the variables that only the step knows of."""

import dataclasses
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.distributed import replica_consistency
from hvdtrain.distributed.optimizers import optimizers_of
from hvdtrain.errors import UsageError
from hvdtrain.optim.pipeline import in_scope, pipelines_of


def build_by_tracing(model: keras.Model, element_spec: Any) -> None:
    """Creates the variables of a model that is not built, and of its optimizers if it has several.

    Only its ``train_step`` knows how it calls its parts, and which variables each optimizer trains.

    Args:
        element_spec: of ``(data, sample_weight)``, as the feed yields it.

    Raises:
        UsageError: the model has no variables.
    """
    if not replica_consistency.is_built(model) or not (
        optimizers_of(model) == [model.optimizer] or all(each.built for each in optimizers_of(model))
    ):
        trace_train_step(model, element_spec)
    if not model.variables:
        raise UsageError(f"model {model.name!r} must have variables to train. Received: none.")


def trace_train_step(model: keras.Model, element_spec: Any) -> None:
    """Traces a model's ``train_step``, which creates the variables that it needs, and runs nothing.

    Args:
        element_spec: of ``(data, sample_weight)``, as the feed yields it.
    """
    data, _ = element_spec
    step = tf.function(tf.autograph.experimental.do_not_convert(lambda data: [model.train_step(data), None][1]))
    # Replicas become equal later.
    with in_scope([(leaf, dataclasses.replace(pipeline, start=None)) for leaf, pipeline in pipelines_of(model)]):
        step.get_concrete_function(data)
    model.reset_metrics()
