"""Batch normalisation over the whole global batch."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from hvdtrain import runtime
from hvdtrain.collectives import Collectives


def synchronize_batch_normalization(
    model: keras.Model,
    *,
    all_layers: bool = True,
    collectives: Collectives | None = None,
    part_weight: Callable[[], tf.Tensor | None] = lambda: None,
) -> int:
    """Makes BatchNormalization layers take mean and variance over the samples of all ranks.

    Outputs and gradients are then those of one process with the whole batch. Keras' own
    ``synchronized=True`` speaks to ``tf.distribute`` and reduces nothing between Horovod's ranks.
    One message a layer forward, one backward. Means and squared deviations are merged as in Chan,
    Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979.

    Args:
        model: a built model; its layers are changed in place, and a saved model holds no trace of it
            but ``synchronized=True``.
        all_layers: False: only those made with ``synchronized=True``.
        collectives: what to reduce with (default: those of ``hvdtrain.init()``).
        part_weight: while a step is traced, what the rank's samples count for; 0 leaves them out.

    Returns:
        The number of layers that are synchronised.
    """
    collectives = collectives or runtime.current().collectives
    layers = [
        layer
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.BatchNormalization) and (all_layers or layer.synchronized)
    ]
    for i, layer in enumerate(layers):
        layer.synchronized = True
        if collectives.size > 1:
            layer._moments = _moments_over_ranks(layer, f"hvdtrain_batchnorm_{i}", collectives, part_weight)
    return len(layers)


def _moments_over_ranks(
    layer: Any, name: str, collectives: Collectives, part_weight: Callable[[], tf.Tensor | None]
) -> Callable[[tf.Tensor, tf.Tensor | None], tuple[tf.Tensor, tf.Tensor]]:
    def moments(inputs: tf.Tensor, mask: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
        axes, channels = layer._reduction_axes, inputs.shape[layer.axis]
        if mask is None:
            count = tf.cast(tf.size(inputs), inputs.dtype) / channels
            mean, variance = tf.nn.moments(inputs, axes)
        else:
            # As Keras does: masked positions count for nothing.
            weights = tf.cast(mask[..., tf.newaxis], inputs.dtype) * tf.ones_like(inputs)
            count = tf.reduce_sum(weights) / channels
            mean = tf.reduce_sum(inputs * weights, axes) / tf.maximum(count, 1)
            shape = [1] * len(inputs.shape)
            shape[layer.axis] = channels
            deviation = (inputs - tf.reshape(mean, shape)) * weights
            variance = tf.reduce_sum(tf.square(deviation), axes) / tf.maximum(count, 1)
        weight = part_weight()
        if weight is not None:
            count *= tf.cast(weight > 0, count.dtype)
        rows = collectives.gather_rows(tf.concat([count[tf.newaxis], mean, variance], axis=0), name)
        counts, means, variances = rows[:, :1], rows[:, 1 : channels + 1], rows[:, channels + 1 :]
        total = tf.reduce_sum(counts)
        mean = tf.reduce_sum(counts * means, axis=0) / total
        variance = tf.reduce_sum(counts * (variances + tf.square(means - mean)), axis=0) / total
        return mean, variance

    return moments
