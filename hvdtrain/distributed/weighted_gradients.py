"""The gradients of collectives in a forward pass, of ranks whose losses have different weights.

Such a gradient adds up what the losses of all ranks contribute. If a step multiplies its loss by this rank's weight, as
Keras' own ``train_step`` does, the sum is weighted. If it does not, this rank's gradients are multiplied by its weight
later: what the other ranks contribute would then have this rank's weight instead of theirs.
"""

from collections.abc import Callable

import tensorflow as tf

GradientWeight = Callable[[], tf.Tensor | None]
"""While a backward pass is traced: the weight by which this rank's gradients are multiplied later; None: by none."""


def of_weighted_losses(
    collective: Callable[[tf.Tensor], tf.Tensor], own: tf.Tensor, weight: GradientWeight
) -> tf.Tensor:
    """Calls a collective whose gradient is the sum over ranks, so that each rank contributes by its own weight."""

    @tf.custom_gradient
    def divided(value: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        return tf.identity(value), lambda upstream: _scaled(upstream, weight(), tf.math.reciprocal_no_nan)

    @tf.custom_gradient
    def multiplied(value: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        return tf.identity(value), lambda upstream: _scaled(upstream, weight(), tf.identity)

    return multiplied(collective(divided(own)))


def _scaled(upstream: tf.Tensor, weight: tf.Tensor | None, factor: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    return upstream if weight is None else upstream * tf.cast(factor(weight), upstream.dtype)
