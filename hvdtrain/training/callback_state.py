"""What callbacks remember of a run: saved in checkpoints, and restored when training begins."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from hvdtrain.checkpoint.plain_values import is_plain

# The attributes of these are their position in a file, not the state of the run.
_WITHOUT_STATE = (keras.callbacks.CSVLogger, keras.callbacks.ProgbarLogger, keras.callbacks.TensorBoard)
# What Keras itself sets, in every callback.
_OF_KERAS = ("model", "_model", "params")

RESTORABLE = "of callbacks, numbers, strings, arrays and structures of these are kept"
"""The end of a message about attributes that a resumed run will lack."""


class CallbackState:
    """The state of callbacks: their attributes that have changed since training began.

    Options set by the user, such as ``patience``, have not changed, and are not restored in a resumed run. An attribute
    is kept if it is plain (a number, string, array, or a structure of these) or a function of ``keras.ops``: Keras'
    ``ReduceLROnPlateau`` and ``EarlyStopping`` choose the one by which they compare at the end of the first epoch, and
    change the sign of ``min_delta`` then; one without the other would reverse their decisions.
    """

    def __init__(self, callbacks: Sequence[keras.callbacks.Callback]):
        self._callbacks = callbacks
        self._at_beginning: list[dict[str, Any]] = []
        self._reported: set[str] = set()

    def begin(self) -> None:
        """After ``on_train_begin`` of all callbacks, which resets them."""
        self._at_beginning = [_attributes(callback) for callback in self._callbacks]

    def state(self) -> list[dict[str, Any]]:
        """For each callback its class, and the attributes that have changed."""
        found = []
        for callback, changed in zip(self._callbacks, self._changed(), strict=True):
            functions = {name: value.__name__ for name, value in changed.items() if _is_operation(value)}
            plain = {name: value for name, value in changed.items() if is_plain(value)}
            found.append({"class": type(callback).__name__, "attributes": plain, "functions": functions})
        return found

    def restore(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Restores what :meth:`state` returned."""
        for callback, saved in zip(self._callbacks, state, strict=False):
            if saved["class"] == type(callback).__name__:
                vars(callback).update(saved["attributes"])
                vars(callback).update({name: getattr(keras.ops, value) for name, value in saved["functions"].items()})

    def newly_unrestorable(self) -> list[str]:
        """The attributes that have changed and cannot be kept, each returned once."""
        found = {
            f"{type(callback).__name__}.{name}"
            for callback, changed in zip(self._callbacks, self._changed(), strict=True)
            for name, value in changed.items()
            if not is_plain(value) and not _is_operation(value)
        }
        new = sorted(found - self._reported)
        self._reported |= found
        return new

    def _changed(self) -> list[dict[str, Any]]:
        return [
            {
                name: value
                for name, value in _attributes(each).items()
                if name not in before or not _same(value, before[name])
            }
            for each, before in zip(self._callbacks, self._at_beginning, strict=True)
        ]


def _attributes(callback: keras.callbacks.Callback) -> dict[str, Any]:
    if isinstance(callback, _WITHOUT_STATE):
        return {}
    # Copied: otherwise a list that grows later would seem unchanged.
    return {
        name: copy.deepcopy(value) if is_plain(value) else value
        for name, value in vars(callback).items()
        if name not in _OF_KERAS
    }


def _same(one: Any, other: Any) -> bool:
    if not is_plain(one) or not is_plain(other) or isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return one is other
    try:
        return bool(one == other)
    except ValueError:  # lists of arrays
        return False


def _is_operation(value: Any) -> bool:
    return callable(value) and getattr(keras.ops, getattr(value, "__name__", ""), None) is value
