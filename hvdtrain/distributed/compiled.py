"""Functions that TensorFlow compiles."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function, without AutoGraph, which took most of the time of a small broadcast."""
    return tf.function(tf.autograph.experimental.do_not_convert(function))
