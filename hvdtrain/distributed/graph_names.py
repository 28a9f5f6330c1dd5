"""Names of reductions in compiled steps."""

import tensorflow as tf


def unique_name(prefix: str) -> str:
    """A name that is the same on every rank, and a different one for each call while a step is traced."""
    if tf.executing_eagerly():
        return prefix
    graph = tf.compat.v1.get_default_graph()
    with graph.name_scope(None):  # Horovod leaves scopes out of names: two layers would have the same one.
        return str(graph.unique_name(prefix))
