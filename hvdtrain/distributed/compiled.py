"""Functions that TensorFlow compiles."""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function, without AutoGraph, which took most of the time of a small broadcast."""
    # As a partial, or TensorFlow would count its traces with those of all functions that have the same code, of which
    # there may be one for each of many names, and warn of frequent tracing.
    return tf.function(functools.partial(tf.autograph.experimental.do_not_convert(function)))
