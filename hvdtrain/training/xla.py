"""A training step that XLA compiles: as a whole if nothing is reduced, else up to the gradients."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import keras
import tensorflow as tf

from hvdtrain.distributed.bounded_messages import is_large
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.gradient_reduction import Gradient, ReducedGradients, is_sparse, unreduced
from hvdtrain.distributed.optimizers import leaves_of, optimizers_of
from hvdtrain.errors import UsageError
from hvdtrain.optim.distributed_optimizer import require_hooks
from hvdtrain.system import devices
from hvdtrain.training.config import StepConfig
from hvdtrain.training.held_gradients import gradients_of_step

T = TypeVar("T")


def is_chosen(model: keras.Model, config: StepConfig, collectives: Collectives) -> bool:
    """Whether XLA compiles the steps of a compiled model.

    By default as Keras does in ``model.compile``, which chooses XLA on a GPU; except where it is excluded, would
    compile again for each of many batch sizes, or might refuse a ``train_step`` of the user's own.
    """
    if config.jit_compile is not None:
        return config.jit_compile
    layers = model._flatten_layers(include_self=False)
    excluded = (
        devices.is_deterministic()
        or config.sync_batchnorm
        or any(isinstance(each, keras.layers.BatchNormalization) and each.synchronized for each in layers)
        or type(model).train_step is not keras.Model.train_step
        or config.balancing.balance
        or collectives.may_change
    )
    return bool(model.jit_compile) and devices.has_gpu() and not excluded


def require_compilable(num_synchronized: int) -> None:
    """Refuses what XLA cannot compile, or not so that runs are bit-identical.

    Args:
        num_synchronized: the model's synchronized BatchNormalization layers.

    Raises:
        UsageError: the model has such layers, or operations must be deterministic.
    """
    if num_synchronized:
        raise UsageError(
            "jit_compile excludes BatchNormalization over all ranks, which communicates in the forward pass. "
            f"Received: {num_synchronized} synchronized layer(s). Leave one of them out."
        )
    if devices.is_deterministic():
        raise UsageError(
            "jit_compile excludes deterministic: XLA has no deterministic form of some operations. Received: both. "
            "Leave one of them out."
        )


class LargeSparseGradientError(Exception):
    """A sparse gradient is too large to be made dense. Raised while a step is traced."""


def compiles_update(model: keras.Model, config: StepConfig) -> bool:
    """Whether XLA may compile a step as a whole, the update included, if it compiles the step at all."""
    leaves = leaves_of(model)
    return (
        len(optimizers_of(model)) == len(leaves) == 1
        and not require_hooks(leaves[0]).collectives.reduces
        and config.gradient_accumulation_steps == 1
    )


@contextlib.contextmanager
def dense_gradients(model: keras.Model) -> Iterator[None]:
    """In the block, an optimizer that reduces nothing makes sparse gradients dense.

    Their rows would have to be made unique first, and XLA knows no operation whose result has a size of its own.

    Raises:
        LargeSparseGradientError: a dense gradient would take much memory.
    """
    hooks = [require_hooks(leaf) for leaf in leaves_of(model)]
    before = [each.reduce for each in hooks]
    for each in hooks:
        each.reduce = _as_dense
    try:
        yield
    finally:
        for each, reduce in zip(hooks, before, strict=True):
            each.reduce = reduce


def _as_dense(gradients: Sequence[Gradient]) -> ReducedGradients:
    dense = []
    for each in gradients:
        if is_sparse(each) and is_large(tf.TensorSpec(each.shape, each.dtype)):
            raise LargeSparseGradientError
        dense.append(tf.convert_to_tensor(each))
    return unreduced(dense)


def compiled_train_step(model: keras.Model, data: Any, read: Callable[[], T]) -> tuple[T, Callable[[], None]]:
    """Runs the model's ``train_step`` without the update.

    Args:
        data: as ``train_step`` takes it.
        read: called at the end of the compiled part, to return a tensor of it.

    Returns:
        What ``read`` returned; and a function that makes the update.

    Raises:
        UsageError: a user's own ``train_step`` does not apply gradients exactly once.
    """
    found, gradients, variables = gradients_of_step(
        model, model.train_step, data, read, option="jit_compile", jit_compile=True
    )
    return found, lambda: model.optimizer.apply(gradients, variables)


class UncompilableModelError(UsageError):
    """XLA does not support an operation of the model."""


def is_uncompilable(error: BaseException) -> bool:
    """Whether a compiled step raised this because XLA does not support an operation."""
    return isinstance(error, (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError)) and "XLA" in str(error)
