"""Recurrent layers compile their loops over time steps, while everything else in a check runs eagerly.

Of a sequence, an eager loop makes thousands of operations. All ways to make a step share a compiled loop. What happens
in a time step is not looked at: the output of the layer is compared.
"""

import contextvars
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import keras
import tensorflow as tf

from hvdtrain.optim.global_loss import losses_over_ranks
from hvdtrain.optim.method_replacement import replace_method

Loop = Callable[..., Any]

_is_compiling: contextvars.ContextVar[bool] = contextvars.ContextVar("hvdtrain_compiled_recurrence", default=False)


class _NotCompiledError(Exception):
    """A time step does what a check must see."""


class _NoScope:
    """Of a time step that asks for the ranks: they are others in each way to make a step."""

    def __getattr__(self, name: str) -> NoReturn:
        raise _NotCompiledError


def require_eager() -> None:
    """Called where random numbers are drawn or variables written: a loop in which that happens is run eagerly."""
    if _is_compiling.get():
        raise _NotCompiledError


@contextmanager
def compiled_recurrence() -> Iterator[None]:
    """In the block, recurrent layers that are called eagerly compile their loops."""
    own = keras.layers.RNN.inner_loop
    loops: dict[Any, Loop | None] = {}

    def inner_loop(layer: Any, sequences: Any, initial_state: Any, mask: Any, training: Any = False) -> Any:
        arguments = sequences, initial_state, mask
        if not tf.executing_eagerly() or tf.is_tensor(training):
            return own(layer, *arguments, training=training)
        flat = tf.nest.flatten(arguments)
        specs = [None if each is None else tf.TensorSpec([None, *each.shape[1:]], each.dtype) for each in flat]
        key = layer, training, tuple(specs)
        if key in loops:
            loop = loops[key]
            return own(layer, *arguments, training=training) if loop is None else loop(flat)

        def run(tensors: list[Any]) -> Any:
            return own(layer, *tf.nest.pack_sequence_as(arguments, tensors), training=training)

        try:
            loop, is_function = _compiled(run, specs)
            outputs = loop(flat)
        except Exception:  # Whatever is wrong with it is so eagerly, too.
            loops[key] = None
            return own(layer, *arguments, training=training)
        if is_function:
            loops[key] = loop
        return outputs

    restore = replace_method(keras.layers.RNN, "inner_loop", inner_loop)
    try:
        yield
    finally:
        restore()


def _compiled(run: Callable[[list[Any]], Any], specs: list[tf.TensorSpec | None]) -> tuple[Loop, bool]:
    """A compiled loop, and whether it is a function of its arguments and of variables only."""
    places = [i for i, spec in enumerate(specs) if spec is not None]

    def with_all(*tensors: tf.Tensor) -> Any:
        flat: list[Any] = [None] * len(specs)
        for place, tensor in zip(places, tensors, strict=True):
            flat[place] = tensor
        return run(flat)

    function = tf.function(with_all, input_signature=[specs[place] for place in places], autograph=False)
    token = _is_compiling.set(True)
    runs_eagerly = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(False)
    try:
        with losses_over_ranks(_NoScope()):  # type: ignore[arg-type]
            concrete = function.get_concrete_function()
    finally:
        tf.config.run_functions_eagerly(runs_eagerly)
        _is_compiling.reset(token)
    is_function = all(each.dtype == tf.resource for each in concrete.captured_inputs)
    return lambda flat: concrete(*(flat[place] for place in places)), is_function
