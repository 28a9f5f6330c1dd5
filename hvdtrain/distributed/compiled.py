"""Functions that TensorFlow compiles."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled, its operations run in parallel; without AutoGraph, which took most of the time of a small broadcast."""
    return tf.function(tf.autograph.experimental.do_not_convert(function))
