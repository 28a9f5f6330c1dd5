"""Names of reductions in compiled steps."""

import tensorflow as tf


def unique_name(prefix: str) -> str:
    """A name that is the same on every rank, and a different one for each call while a step is traced."""
    return prefix if tf.executing_eagerly() else tf.compat.v1.get_default_graph().unique_name(prefix)
