"""Horovod's operations in compiled functions: they run when a step does, and the ranks' names can be compared.

TensorFlow does not know that Horovod's operations communicate. Where it traces or optimizes a function, it computes
operations of constants, such as an allgather of the number of samples of a batch of a fixed size, to learn shapes: one
after the other, and not in the same order on every rank. It also merges operations of equal inputs, and keeps either
name. Ranks would wait for each other under different names.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from hvdtrain.distributed.step_variables import outside_of_step
from hvdtrain.errors import UsageError
from hvdtrain.seams import tensorflow_internals
from hvdtrain.seams.horovod_internals import OPERATIONS

OWN = "hvdtrain_"
"""How the names of hvdtrain's own operations begin; they use :func:`known_late` where it is needed."""

_REPLACED = (
    *("horovod_allreduce", "horovod_grouped_allreduce", "horovod_allgather", "horovod_grouped_allgather"),
    *("horovod_broadcast", "horovod_alltoall", "horovod_reducescatter", "horovod_grouped_reducescatter"),
)
_noted: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("hvdtrain_operations", default=None)
_zero: tf.Variable | None = None
_has_reduced = False


def known_late(tensor: tf.Tensor) -> tf.Tensor:
    """The same tensor, whose value TensorFlow does not know before the step runs."""
    global _zero
    if _zero is None:
        with outside_of_step(), tf.device("CPU"):
            _zero = tf.Variable(0, trainable=False)
    return tf.ensure_shape(tf.reshape(tensor, tf.shape(tensor) + _zero.read_value()), tensor.shape)


def run_operations_late() -> None:
    """From now on, the operations that a program calls are computed when its step runs, their gradients as well."""
    library = OPERATIONS.value()
    for name in _REPLACED:
        function = getattr(library, name)
        if not hasattr(function, "__wrapped__"):
            setattr(library, name, _run_late(function))


def _run_late(function: Callable[..., Any]) -> Callable[..., Any]:
    # AutoGraph finds no source of Horovod's function, and would warn of it.
    @tf.autograph.experimental.do_not_convert
    @functools.wraps(function)
    def operation(inputs: Any, *arguments: Any, name: str | None = None, **named: Any) -> Any:
        if not tf.executing_eagerly():
            _require_no_xla()
        if (name or "").startswith(OWN):
            return function(inputs, *arguments, name=name, **named)
        note_own_reduction()
        if tf.executing_eagerly():
            return function(inputs, *arguments, name=name, **named)
        late = tf.nest.map_structure(lambda each: known_late(tf.convert_to_tensor(each)), inputs)
        outputs = function(late, *arguments, name=name, **named)
        if (noted := _noted.get()) is not None:
            full = tf.nest.flatten(outputs)[0].op.name
            noted.append(full.rpartition("/")[2] if named.get("ignore_name_scope") else full)
        return outputs

    return operation


def _require_no_xla() -> None:
    if tensorflow_internals.IS_COMPILED_BY_XLA.value()(tf.compat.v1.get_default_graph()):
        raise UsageError(
            "ranks must communicate outside of functions that XLA compiles. Received: a reduction of gradients, or "
            "another operation of Horovod, within tf.function(jit_compile=True). Compile a function that returns "
            "gradients, and pass them to the optimizer's apply outside of it."
        )


def note_own_reduction() -> None:
    """The program itself combines values of ranks, which may be gradients."""
    global _has_reduced
    _has_reduced = True


def has_own_reductions() -> bool:
    """Whether the program itself has combined values of ranks, or has traced a step that does."""
    return _has_reduced


@contextlib.contextmanager
def noted_operations() -> Iterator[list[str]]:
    """Collects the names of the operations of a program that are traced in the block, as Horovod knows them."""
    names: list[str] = []
    token = _noted.set(names)
    try:
        yield names
    finally:
        _noted.reset(token)
