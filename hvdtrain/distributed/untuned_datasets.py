"""Datasets whose iterators can be deleted at once, so that a rank that ends an epoch keeps no other waiting."""

import tensorflow as tf


def without_autotuning(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Disables tf.data's autotuning, unless the dataset's options say whether to tune.

    The thread that tunes sleeps between two rounds, at first for milliseconds and later for up to a minute. The
    destructor of the iterator waits for this thread: TensorFlow wakes it, but marks the iterator as cancelled only
    afterwards, so that a thread that looks too early goes back to sleep. Without tuning, ``tf.data.AUTOTUNE`` stands
    for as many parallel calls as tf.data has threads, 16 at most.

    Args:
        dataset: any dataset.

    Returns:
        The same elements in the same order.
    """
    if dataset.options().autotune.enabled is not None:
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)
