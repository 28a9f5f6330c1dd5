"""Variables that a step creates while it is traced."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf


@contextlib.contextmanager
def outside_of_step() -> Iterator[None]:
    """Creates variables outside of the step that is traced, with their initial values.

    With ``tf.init_scope`` alone, TensorFlow notices them, traces the step a second time, and refuses those of later
    traces.
    """
    with tf.init_scope(), tf.variable_creator_scope(_create_unnoticed):
        yield


def _create_unnoticed(create: Callable[..., tf.Variable], **arguments: Any) -> tf.Variable:
    return create(**arguments | {"experimental_enable_variable_lifting": False})
