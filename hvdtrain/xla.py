"""A train step whose forward and backward pass XLA compiles; reduction and update stay outside, where Horovod is."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import keras
import tensorflow as tf

from hvdtrain import process
from hvdtrain.errors import UsageError

T = TypeVar("T")


def require_compilable(num_synchronized: int) -> None:
    """Tells what XLA cannot compile, or not so that runs are equal to the bit.

    Args:
        num_synchronized: the model's BatchNormalization layers that ask other ranks.

    Raises:
        UsageError: there is such a thing.
    """
    if num_synchronized:
        raise UsageError(
            "jit_compile does not go with BatchNormalization over all ranks, which asks them in the forward pass. "
            f"Received: {num_synchronized} synchronised layer(s). Leave either out."
        )
    if process.is_deterministic():
        raise UsageError(
            "jit_compile does not go with deterministic: XLA has no deterministic form of some operations. Leave "
            "either out."
        )


def compiled_train_step(model: keras.Model, data: Any, noted: Callable[[], T]) -> tuple[T, Callable[[], None]]:
    """Makes the model's ``train_step``, but for the update.

    Args:
        data: as ``train_step`` takes it.
        noted: called at the end of what is compiled, for a tensor of it.

    Returns:
        What was noted; and what makes the update.

    Raises:
        UsageError: a ``train_step`` of the user's own does not apply gradients once.
    """
    optimizer = model.optimizer
    apply = optimizer.apply
    held: list[tuple[Sequence[Any], Any]] = []

    def hold(grads: Sequence[Any], trainable_variables: Any = None) -> None:
        held.append((grads, trainable_variables))

    def compute(data: Any) -> tuple[T, list[list[Any]]]:
        held.clear()  # TensorFlow may trace it twice.
        model.train_step(data)
        return noted(), [list(grads) for grads, _ in held]

    optimizer.apply = hold
    try:
        found, gradients = tf.function(compute, jit_compile=True, autograph=False)(data)
    finally:
        optimizer.apply = apply
    if len(held) != 1:
        raise UsageError(
            f"with jit_compile, train_step must apply gradients once. Received: {type(model).__name__}.train_step, "
            f"which does {len(held)} times. Leave jit_compile out."
        )
    return found, lambda: apply(gradients[0], held[0][1])


def is_uncompilable(error: BaseException) -> bool:
    """True for what a compiled step raises where XLA does not know an operation."""
    return isinstance(error, (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError)) and "XLA" in str(error)
