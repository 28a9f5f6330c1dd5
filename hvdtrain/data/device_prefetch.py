"""Copies batches to the device that computes, ahead of the steps that use them."""

import tensorflow as tf

from hvdtrain.config.wording import option
from hvdtrain.errors import UsageError

_BATCHES_AHEAD = 2


def prefetch_to(device: str, dataset: tf.data.Dataset) -> tf.data.Dataset:
    """A dataset with the same elements in the same order, whose iterator yields tensors on a device.

    Args:
        device: ``/GPU:0``.

    Raises:
        UsageError: elements contain strings, or ragged or sparse tensors.
    """
    for spec in tf.nest.flatten(dataset.element_spec):
        if not isinstance(spec, tf.TensorSpec) or spec.dtype in (tf.string, tf.variant):
            raise UsageError(
                f"{option('prefetch_to_device', True)} copies dense tensors of numbers. Received: samples with "
                f"{spec}. Leave the option out, or convert them in the source."
            )
    return dataset.apply(tf.data.experimental.prefetch_to_device(device, _BATCHES_AHEAD))
