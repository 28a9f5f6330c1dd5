"""Batches of different sizes in a step of ``model.fit``: each rank's gradients are weighted by its samples.

The last batch may be smaller on one rank, and data sets that group samples by length have batches of many sizes. The
mean over ranks of the means over their samples is not the mean over all samples.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.distributed.gradient_reduction import Gradient, values_of, with_values
from hvdtrain.optim.pipeline import GradientPipeline, Pipelines, in_scope

# The gradients of losses of some samples must not overflow in half precision.
_UNIT = 32.0


@dataclasses.dataclass
class BatchWeight:
    """The weight of a rank's batch in a step that is traced."""

    value: tf.Tensor
    """The number of its samples, in units that are the same on all ranks."""
    is_in_loss: bool = False
    """Whether the loss was multiplied by it; otherwise the gradients are."""

    def of_gradients(self) -> tf.Tensor | None:
        """The weight by which gradients are multiplied; None if the loss was."""
        return None if self.is_in_loss else self.value


def batch_weight(data: Any, pipelines: Pipelines, *, is_of_update: bool = False) -> BatchWeight | None:
    """The weight of a batch; None where ranks are not weighted.

    These are sums of losses, several batches per update, and layers that each rank trains alone.

    Args:
        is_of_update: whether each rank's batches of an update have the same number of samples.
    """
    flat = [each for each in tf.nest.flatten(data) if each is not None and len(getattr(each, "shape", ()))]
    averages = all(
        pipeline.reduce.config.op == "average" and not pipeline.reduce.local_variables() for _, pipeline in pipelines
    )
    accumulates = not is_of_update and any(leaf.gradient_accumulation_steps for leaf, _ in pipelines)
    if not flat or not averages or accumulates:
        return None
    first = flat[0]
    rows = first.dense_shape[0] if isinstance(first, tf.SparseTensor) else tf.shape(first)[0]
    dtype = tf.float64 if keras.config.floatx() == "float64" else tf.float32
    return BatchWeight(tf.cast(rows, dtype) / _UNIT)


@contextlib.contextmanager
def weighted(pipelines: Pipelines, weight: BatchWeight) -> Iterator[None]:
    """In the block, a step is traced whose gradients are means over the samples of all ranks."""
    with in_scope([(leaf, _weighted(pipeline, weight)) for leaf, pipeline in pipelines]):
        yield


def _weighted(own: GradientPipeline, weight: BatchWeight) -> GradientPipeline:
    def weigh(loss: tf.Tensor) -> tf.Tensor:
        weight.is_in_loss = True
        return own.weigh(loss) * tf.cast(weight.value, loss.dtype)

    def mark(gradients: Sequence[Gradient | None], was_weighed: bool) -> Sequence[Gradient | None]:
        if was_weighed:
            return own.mark(gradients, was_weighed)
        multiplied = [None if each is None else _times(each, weight.value) for each in gradients]
        return own.mark(multiplied, was_weighed)

    reduction = dataclasses.replace(own.reduce, step_weight=lambda: weight.value)
    return dataclasses.replace(own, weigh=weigh, mark=mark, reduce=reduction)


def _times(gradient: Gradient, weight: tf.Tensor) -> Gradient:
    values = values_of(gradient)
    return with_values(gradient, values * tf.cast(weight, values.dtype))
