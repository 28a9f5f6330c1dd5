"""Recurrent layers compile what they do in a time step, while everything else in a check runs eagerly.

Of a sequence, an eager loop makes thousands of operations, and to compile a whole loop and its gradient takes longer
than all else of a check. All ways to make a step share a compiled time step. What happens in it is not looked at: the
output of the layer is compared.
"""

import contextvars
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import keras
import tensorflow as tf

from hvdtrain.optim.global_loss import losses_over_ranks
from hvdtrain.optim.method_replacement import replace_method

TimeStep = Callable[..., list[tf.Tensor]]
"""Receives inputs, a mask or None, and states; returns the output and the states."""

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
    """In the block, recurrent layers that are called eagerly compile their time steps."""
    own = keras.layers.RNN.inner_loop
    compiled: dict[Any, TimeStep | None] = {}

    def inner_loop(layer: Any, sequences: Any, initial_state: Any, mask: Any, training: Any = False) -> Any:
        def loop_of_keras() -> Any:
            return own(layer, sequences, initial_state, mask, training=training)

        def time_step(inputs: Any, mask: Any, states: Any) -> list[Any]:
            states = tf.nest.pack_sequence_as(initial_state, states)
            output, _, states = own(layer, inputs, states, mask, training=training)
            return [output, *tf.nest.flatten(states)]

        if not tf.executing_eagerly() or tf.is_tensor(training):
            return loop_of_keras()
        inputs = [
            tf.TensorSpec([None, 1, *each.shape[2:]], each.dtype) for each in (sequences, mask) if each is not None
        ]
        states = [tf.TensorSpec([None, *each.shape[1:]], each.dtype) for each in tf.nest.flatten(initial_state)]
        key = layer, training, *inputs, *states
        if key in compiled:
            step = compiled[key]
            return loop_of_keras() if step is None else _loop(layer, step, sequences, initial_state, mask)
        try:
            with _unrolled(layer):
                step, is_function = _compiled(time_step, inputs, states)
            result = _loop(layer, step, sequences, initial_state, mask)
        except Exception:  # Whatever is wrong with it is so eagerly, too.
            compiled[key] = None
            return loop_of_keras()
        if is_function:
            compiled[key] = step
        return result

    restore = replace_method(keras.layers.RNN, "inner_loop", inner_loop)
    try:
        yield
    finally:
        restore()


@contextmanager
def _unrolled(layer: Any) -> Iterator[None]:
    """In the block, a layer makes its one time step without a loop."""
    before, layer.unroll = layer.unroll, True
    try:
        yield
    finally:
        layer.unroll = before


def _loop(layer: Any, step: TimeStep, sequences: tf.Tensor, initial_state: Any, mask: tf.Tensor | None) -> Any:
    """What a recurrent layer's ``inner_loop`` returns."""
    num_steps = sequences.shape[1]
    inputs = tf.split(sequences, num_steps, axis=1)
    masks = [None] * num_steps if mask is None else tf.split(mask, num_steps, axis=1)
    states = tf.nest.flatten(initial_state)
    outputs: list[tf.Tensor] = []
    for i in reversed(range(num_steps)) if layer.go_backwards else range(num_steps):
        output, *states = step(inputs[i], masks[i], states)
        if outputs and masks[i] is not None and not layer.zero_output_for_mask:
            is_valid = tf.reshape(masks[i], [-1] + [1] * (len(output.shape) - 1))
            output = tf.where(tf.cast(is_valid, tf.bool), output, outputs[-1])
        outputs.append(output)
    sequence = tf.stack(outputs if layer.return_sequences else outputs[-1:], axis=1)
    structure = initial_state if tf.nest.is_nested(initial_state) else [initial_state]
    return outputs[-1], sequence, tf.nest.pack_sequence_as(structure, states)


def _compiled(time_step: TimeStep, inputs: list[tf.TensorSpec], states: list[tf.TensorSpec]) -> tuple[TimeStep, bool]:
    """A compiled time step, and whether it is a function of its arguments and of variables only."""

    def of_tensors(*tensors: tf.Tensor) -> list[tf.Tensor]:
        own, mask = (*tensors[: len(inputs)], None)[:2]
        return time_step(own, mask, tensors[len(inputs) :])

    function = tf.function(of_tensors, input_signature=[*inputs, *states], autograph=False)
    token = _is_compiling.set(True)
    runs_eagerly = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(False)
    try:
        with losses_over_ranks(_NoScope()):  # type: ignore[arg-type]
            concrete = function.get_concrete_function()
    finally:
        tf.config.run_functions_eagerly(runs_eagerly)
        _is_compiling.reset(token)

    def step(own: tf.Tensor, mask: tf.Tensor | None, states: list[tf.Tensor]) -> list[tf.Tensor]:
        return concrete(own, *([] if mask is None else [mask]), *states)

    return step, all(each.dtype == tf.resource for each in concrete.captured_inputs)
