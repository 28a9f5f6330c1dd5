"""A training step that XLA compiles: as a whole if nothing is reduced, else up to the gradients."""

import dataclasses
from collections.abc import Mapping, Sequence

import keras
import tensorflow as tf

from hvdtrain.config import exclusions
from hvdtrain.config.exclusions import Fact
from hvdtrain.distributed.bounded_messages import is_large
from hvdtrain.distributed.gradient_reduction import Gradient, ReducedGradients, is_sparse, unreduced
from hvdtrain.distributed.optimizers import leaves_of, optimizers_of
from hvdtrain.errors import UsageError
from hvdtrain.optim.pipeline import Check, Pipelines, require_pipeline
from hvdtrain.system import devices
from hvdtrain.training.config import StepConfig


def is_chosen(model: keras.Model, config: StepConfig, facts: Mapping[Fact, str]) -> bool:
    """Whether XLA compiles the steps of a compiled model.

    By default as Keras does in ``model.compile``, which chooses XLA on a GPU; except where it is excluded, would
    compile again for each of many batch sizes, or might refuse a ``train_step`` of the user's own.

    Args:
        facts: the facts that hold for the job.
    """
    if config.jit_compile is not None:
        return config.jit_compile
    is_excluded = (
        exclusions.first_broken({**facts, exclusions.JIT_COMPILE: ""}) is not None
        or type(model).train_step is not keras.Model.train_step
        or exclusions.ELASTIC in facts
    )
    return bool(model.jit_compile) and devices.has_gpu() and not is_excluded


class LargeSparseGradientError(Exception):
    """A sparse gradient is too large to be made dense. Raised while a step is traced."""


def compiles_update(model: keras.Model, config: StepConfig) -> bool:
    """Whether XLA may compile a step as a whole, the update included, if it compiles the step at all."""
    leaves = leaves_of(model)
    return (
        len(optimizers_of(model)) == len(leaves) == 1
        and not require_pipeline(leaves[0]).reduce.collectives.reduces
        and config.gradient_accumulation_steps == 1
    )


def pipelines_on_device(pipelines: Pipelines, check: Check) -> Pipelines:
    """What happens to gradients in a step that XLA compiles as a whole: nothing is reduced, and the host reads nothing.

    Sparse gradients become dense there: their rows would have to be made unique first, and XLA has no operations whose
    results are of dynamic size. If that takes much memory, tracing the step raises LargeSparseGradientError.
    """
    return [
        (
            leaf,
            dataclasses.replace(
                pipeline, check=check, start=None, reduce=dataclasses.replace(pipeline.reduce, reducer=_as_dense)
            ),
        )
        for leaf, pipeline in pipelines
    ]


def _as_dense(gradients: Sequence[Gradient]) -> ReducedGradients:
    dense = []
    for each in gradients:
        if is_sparse(each) and is_large(tf.TensorSpec(each.shape, each.dtype)):
            raise LargeSparseGradientError
        dense.append(tf.convert_to_tensor(each))
    return unreduced(dense)


class UncompilableModelError(UsageError):
    """XLA does not support an operation of the model."""


def is_uncompilable(error: BaseException) -> bool:
    """Whether a compiled step raised this because XLA does not support an operation."""
    return isinstance(error, (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError)) and "XLA" in str(error)
