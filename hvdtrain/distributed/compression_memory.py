"""What a compressed reduction keeps from one step to the next."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.distributed.step_variables import outside_of_step
from hvdtrain.errors import UsageError


class CompressionMemory:
    """The variables of a compressed reduction, created in its first step; values that are restored earlier are kept
    until then.

    Args:
        num_ranks: the number of ranks.
        sums: whether gradients are summed over ranks instead of averaged.
    """

    def __init__(self, num_ranks: int, *, sums: bool):
        self._num_ranks = num_ranks
        self._sums = sums
        self.errors: list[keras.Variable] = []
        """This rank's compression errors."""
        self.shared: dict[str, keras.Variable] = {}
        """The state that all ranks have in common."""
        self._shapes: list[tf.TensorShape] | None = None
        self._restored: dict[str, keras.Variable] = {}

    @property
    def is_empty(self) -> bool:
        """Whether there has been no step, and nothing was restored."""
        return self._shapes is None and not self._restored

    def require(self, gradients: Sequence[tf.TensorSpec], shared: Mapping[str, np.ndarray]) -> None:
        """Creates the variables, unless they exist.

        Args:
            gradients: the gradients that are compressed.
            shared: initial values.

        Raises:
            UsageError: the gradients are not those of the first step.
        """
        shapes = [each.shape for each in gradients]
        if self._shapes is None:
            with outside_of_step():
                self.errors = [
                    self._new(f"error_{i}", np.zeros(each.shape, each.dtype.as_numpy_dtype))
                    for i, each in enumerate(gradients)
                ]
                self.shared = {name: self._new(name, value) for name, value in shared.items()}
            self._shapes = shapes
            self._restored.clear()
        if shapes != self._shapes:
            raise UsageError(
                "compression needs the same gradients in every step. Received: gradients of shapes "
                f"{[tuple(each) for each in shapes]} after {[tuple(each) for each in self._shapes]}. Use "
                "compression='none'."
            )

    def _new(self, name: str, initial: np.ndarray) -> keras.Variable:
        restored = self._restored.get(name)
        if restored is not None and (tuple(restored.shape), restored.dtype) == (initial.shape, initial.dtype.name):
            return restored
        return _variable(name, initial)

    def variables(self) -> dict[str, keras.Variable]:
        """All variables, by name; before the first step, those that were restored, so that they are saved again."""
        if self._shapes is None:
            return dict(self._restored)
        return {**{f"error_{i}": each for i, each in enumerate(self.errors)}, **self.shared}

    def slot(self, name: str) -> "MemorySlot":
        """The place of a variable, which need not exist yet."""
        return MemorySlot(self, name)

    def restore(self, name: str, value: np.ndarray) -> None:
        """Restores a variable. Variables of another compression are ignored."""
        variable = self.variables().get(name)
        if self._shapes is None:
            self._restored[name] = _variable(name, value)
        elif variable is not None and tuple(variable.shape) == value.shape:
            variable.assign(value)

    def of_other_ranks(self, name: str, values: Sequence[np.ndarray], ranks: int) -> np.ndarray:
        """The value with which each of ``ranks`` ranks continues, from the values of the previous ranks."""
        if not name.startswith("error_"):
            return values[0]  # equal on all ranks
        return np.sum(values, axis=0) / (ranks if self._sums else len(values))

    def change_ranks(self, num_ranks: int, *, keeps_errors: bool) -> None:
        """Continues with a different number of ranks.

        Args:
            keeps_errors: False if this rank continues after a step that only other ranks have made; otherwise its
                errors count as much in the mean over these ranks as before.
        """
        factor = (1.0 if self._sums else num_ranks / self._num_ranks) if keeps_errors else 0.0
        for error in self.errors if factor != 1 else ():
            error.assign(error.value * tf.cast(factor, error.dtype))
        self._num_ranks = num_ranks


def _variable(name: str, value: np.ndarray) -> keras.Variable:
    return keras.Variable(value, trainable=False, dtype=value.dtype.name, name=name, autocast=False)


class MemorySlot(NamedTuple):
    """The place of a variable in a memory."""

    memory: CompressionMemory
    name: str

    def assign(self, value: np.ndarray) -> None:
        """Restores the variable, now or when it is created."""
        self.memory.restore(self.name, value)

    def of_other_ranks(self, values: Sequence[np.ndarray], ranks: int) -> np.ndarray:
        """See :meth:`CompressionMemory.of_other_ranks`."""
        return self.memory.of_other_ranks(self.name, values, ranks)
