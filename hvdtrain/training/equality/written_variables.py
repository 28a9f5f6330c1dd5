"""The variables that eager code writes, whoever owns them, so that a step can be undone."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import tensorflow as tf

from hvdtrain.optim.method_replacement import replace_method
from hvdtrain.seams import tensorflow_internals
from hvdtrain.training.equality.compiled_recurrence import require_eager


@dataclasses.dataclass(frozen=True)
class Written:
    """A variable that was written."""

    variable: tf.Variable
    before: tf.Tensor
    """Its value before the first write."""


class WrittenVariables:
    """Notes each variable at its first write in a block, with its value before."""

    def __init__(self) -> None:
        self._found: dict[int, Written] = {}

    @contextmanager
    def noted(self) -> Iterator[None]:
        """In the block, writes are noted; not those of operations on a variable's handle, see :meth:`note`."""
        base = tensorflow_internals.RESOURCE_VARIABLE.value()
        with ExitStack() as stack:
            for owner in (base, *base.__subclasses__()):
                for name in [each for each in vars(owner) if each.startswith(tensorflow_internals.WRITES)]:
                    stack.callback(replace_method(owner, name, self._noting(vars(owner)[name])))
            yield

    def _noting(self, write: Callable[..., Any]) -> Callable[..., Any]:
        def note_and_write(variable: tf.Variable, *arguments: Any, **named: Any) -> Any:
            self.note(variable)
            return write(variable, *arguments, **named)

        return note_and_write

    def note(self, variable: tf.Variable) -> None:
        """Notes a variable that is about to be written."""
        require_eager()
        if not tf.executing_eagerly() or id(variable) in self._found or not variable.is_initialized():
            return
        self._found[id(variable)] = Written(variable, variable.read_value())

    @property
    def found(self) -> list[Written]:
        """The variables, in the order of their first writes."""
        return list(self._found.values())

    def restore(self) -> None:
        """Gives all variables the values of before."""
        for each in self._found.values():
            each.variable.assign(each.before)
