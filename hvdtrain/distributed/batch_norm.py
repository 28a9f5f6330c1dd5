"""Mean and variance of a batch over the samples of all ranks, for batch normalization.

Means and squared deviations are merged as in Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for
computing sample variances", 1979.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.weighted_gradients import GradientWeight, of_weighted_losses
from hvdtrain.seams import keras_internals

Moments = Callable[[tf.Tensor, tf.Tensor | None], tuple[tf.Tensor, tf.Tensor]]


def layers_of_each_rank(model: keras.Model) -> list[keras.layers.BatchNormalization]:
    """The trained layers that normalize over the samples of each rank alone.

    Those made with ``synchronized=True`` are among them if ``synchronize_batch_normalization`` was not called for the
    model: Keras alone synchronizes under ``tf.distribute``.
    """
    layers = keras_internals.FLATTEN_LAYERS.of(model)()
    found = [each for each in layers if isinstance(each, keras.layers.BatchNormalization) and each.trainable]
    return [each for each in found if keras_internals.MOMENTS.name not in vars(each)]


def moments_over_ranks(
    layer: Any,
    name: str,
    collectives: Collectives,
    sample_weight: Callable[[], tf.Tensor | None],
    gradient_weight: GradientWeight,
) -> Moments:
    """A function with which a BatchNormalization layer computes mean and variance over the samples of all ranks.

    Args:
        layer: gives the axes to reduce.
        name: the name of the collective, the same on every rank.
        sample_weight: while a step is traced, the weight of this rank's samples; 0 leaves them out.
        gradient_weight: by which this rank's gradients are multiplied later.
    """

    def moments(inputs: tf.Tensor, mask: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
        axes, channels = keras_internals.REDUCTION_AXES.of(layer), inputs.shape[layer.axis]
        if mask is None:
            count = tf.cast(tf.size(inputs), inputs.dtype) / channels
            mean, variance = tf.nn.moments(inputs, axes)
        else:
            # As in Keras, masked positions are left out.
            weights = tf.cast(mask[..., tf.newaxis], inputs.dtype) * tf.ones_like(inputs)
            count = tf.reduce_sum(weights) / channels
            mean = tf.reduce_sum(inputs * weights, axes) / tf.maximum(count, 1)
            shape = [1] * len(inputs.shape)
            shape[layer.axis] = channels
            deviation = (inputs - tf.reshape(mean, shape)) * weights
            variance = tf.reduce_sum(tf.square(deviation), axes) / tf.maximum(count, 1)
        weight = sample_weight()
        if weight is not None:
            count *= tf.cast(weight > 0, count.dtype)
        own = tf.concat([count[tf.newaxis], mean, variance], axis=0)
        rows = of_weighted_losses(lambda row: collectives.gather_rows(row, name), own, gradient_weight)
        counts, means, variances = rows[:, :1], rows[:, 1 : channels + 1], rows[:, channels + 1 :]
        total = tf.reduce_sum(counts)
        mean = tf.reduce_sum(counts * means, axis=0) / total
        variance = tf.reduce_sum(counts * (variances + tf.square(means - mean)), axis=0) / total
        return mean, variance

    return moments
