"""A loss that is not finite is written into a gradient, so that the reduction carries it to all ranks."""

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from hvdtrain.distributed.bounded_messages import is_large
from hvdtrain.distributed.gradient_reduction import Gradient
from hvdtrain.training.step_times import StepTimes


class LossMarker:
    """Marks gradients, and knows in the compiled step whether this rank's loss is finite.

    Args:
        times: counts the steps.
    """

    def __init__(self, times: StepTimes):
        self._times = times
        self._finite_so_far = tf.Variable(True, trainable=False)
        """Whether the loss is finite in the micro-batches of the current step; for steps of several, or in halves."""
        self._was_computed_finite: tf.Tensor | bool = True
        self.is_finite: tf.Tensor | bool = True
        """While a step is traced: whether this rank's loss is finite in it."""

    def mark(self, loss: tf.Tensor | None, gradients: Sequence[Gradient | None]) -> list[Gradient | None]:
        """Writes NaN into the smallest gradient if the loss is not finite.

        Args:
            loss: None if a user's own train_step does not pass it to ``scale_loss``.
        """
        result = list(gradients)
        dense = [i for i, gradient in enumerate(result) if isinstance(gradient, tf.Tensor)]
        self.is_finite = self._was_computed_finite
        if loss is not None and dense:
            finite = self.is_finite = tf.math.is_finite(loss)
            if self._times.micro_batches_per_step > 1:
                self._finite_so_far.assign(finite & (self._times.begins_step() | self._finite_so_far))
                self.is_finite = self._finite_so_far.read_value()
            smallest = min(dense, key=lambda i: result[i].shape.num_elements() or np.inf)  # type: ignore[union-attr]
            gradient = result[smallest]
            result[smallest] = _nan_unless(finite, gradient)
        return result

    def end_gradients(self) -> None:
        """Keeps whether the loss is finite; call it in a compiled function whose gradients another one applies."""
        self._finite_so_far.assign(self.is_finite)

    @contextlib.contextmanager
    def update_of(self, has_contributed: tf.Tensor) -> Iterator[None]:
        """The block, in that other one, applies the gradients; this rank's loss counts if it has contributed."""
        self._was_computed_finite = self._finite_so_far.read_value() | ~has_contributed
        try:
            yield
        finally:
            self._was_computed_finite = True


def _nan_unless(finite: tf.Tensor, gradient: tf.Tensor) -> tf.Tensor:
    nan = tf.constant(np.nan, gradient.dtype)
    if not is_large(gradient):
        return tf.where(finite, gradient, nan)
    # A copy takes memory; TensorFlow writes one element in place.
    first = [[0] * gradient.shape.rank]
    return tf.tensor_scatter_nd_update(gradient, first, tf.where(finite, tf.gather_nd(gradient, first), nan))
