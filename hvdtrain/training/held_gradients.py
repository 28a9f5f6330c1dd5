"""The first half of a training step: a model's own ``train_step`` up to its gradients, which are not applied."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import keras
import tensorflow as tf

from hvdtrain.distributed.optimizers import optimizers_of
from hvdtrain.errors import UsageError
from hvdtrain.optim.hooks import held_gradients, run_train_step

T = TypeVar("T")


def gradients_of_step(
    model: keras.Model,
    train_step: Callable[[Any], Any],
    data: Any,
    read: Callable[[], T],
    *,
    option: str,
    jit_compile: bool = False,
) -> tuple[T, Sequence[Any], Sequence[keras.Variable]]:
    """Runs a ``train_step`` without the update; call it while a step is traced.

    Args:
        data: as ``train_step`` takes it.
        read: called at the end, to return a tensor of the step.
        option: what needs the gradients apart from the update, for errors.
        jit_compile: whether XLA compiles it.

    Returns:
        What ``read`` returned, the gradients, and their variables.

    Raises:
        UsageError: the model has several optimizers, or a ``train_step`` of its own does not apply gradients exactly
            once.
    """
    if len(optimizers := optimizers_of(model)) > 1:
        raise UsageError(
            f"with {option}, one optimizer must train the whole model. Received: {type(model).__name__}, with "
            f"{len(optimizers)} optimizers. Leave {option} out."
        )
    with held_gradients(model.optimizer) as held:

        def compute(data: Any) -> tuple[T, list[list[Any]]]:
            held.clear()  # TensorFlow may trace it twice.
            run_train_step(model, train_step, data)
            return read(), [list(grads) for grads, _ in held]

        found, gradients = (tf.function(compute, jit_compile=True, autograph=False) if jit_compile else compute)(data)
    if len(held) != 1:
        raise UsageError(
            f"with {option}, train_step must apply gradients once. Received: {type(model).__name__}.train_step, "
            f"which does {len(held)} times. Leave {option} out."
        )
    return found, gradients[0], held[0][1]
