"""The first half of a training step: a model's own ``train_step`` up to its gradients, which are not applied."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import keras
import tensorflow as tf

from hvdtrain.config import exclusions
from hvdtrain.config.exclusions import Option
from hvdtrain.distributed.optimizers import optimizers_of
from hvdtrain.errors import UsageError
from hvdtrain.optim.pipeline import in_scope, pipelines_of

T = TypeVar("T")


def gradients_of_step(
    model: keras.Model,
    run: Callable[[Any], Any],
    data: Any,
    read: Callable[[], T],
    *,
    option: Option,
    jit_compile: bool = False,
) -> tuple[T, Sequence[Any], Sequence[keras.Variable]]:
    """Runs a ``train_step`` without the update; call it while a step is traced.

    Args:
        run: runs the ``train_step``.
        data: as ``train_step`` takes it.
        read: called at the end, to return a tensor of the step.
        option: the option that needs this, for errors.
        jit_compile: whether XLA compiles it.

    Returns:
        What ``read`` returned, the gradients, and their variables.

    Raises:
        UsageError: the model has several optimizers, or its own ``train_step`` does not apply gradients exactly once.
    """
    if len(optimizers_of(model)) > 1:
        exclusions.require_compatible(exclusions.facts_from(option, exclusions.SEVERAL_OPTIMIZERS))
    held: list[tuple[Sequence[Any], Sequence[keras.Variable] | None]] = []

    def hold(gradients: Sequence[Any], variables: Sequence[keras.Variable] | None) -> None:
        held.append((gradients, variables))

    def compute(data: Any) -> tuple[T, list[list[Any]]]:
        held.clear()  # TensorFlow may trace it twice.
        run(data)
        return read(), [list(gradients) for gradients, _ in held]

    with in_scope([(leaf, dataclasses.replace(pipeline, divert=hold)) for leaf, pipeline in pipelines_of(model)]):
        found, gradients = (tf.function(compute, jit_compile=True, autograph=False) if jit_compile else compute)(data)
    if len(held) != 1:
        raise UsageError(
            f"with {option}, train_step must apply gradients once. Received: {type(model).__name__}.train_step, "
            f"which does {len(held)} times. Leave {option} out."
        )
    variables = held[0][1]
    return found, gradients[0], model.trainable_variables if variables is None else variables
