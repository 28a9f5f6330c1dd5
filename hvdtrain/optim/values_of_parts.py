"""Losses and metrics of each rank's part of the data, where one process has those of all samples: a line says so."""

import contextlib
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import keras
import tensorflow as tf

from hvdtrain.distributed import runtime
from hvdtrain.distributed.dataset_inputs import with_inputs
from hvdtrain.system.terminal import write

_OF_FIT = (
    "losses and metrics of model.fit are those of each rank's samples. For those of all ranks, pass "
    "callbacks=hvdtrain.callbacks.distributed([…])"
)
_OF_EVALUATE = (
    "model.evaluate received each rank's part of the data, and returns its values. For those of all ranks, pass "
    "callbacks=hvdtrain.callbacks.distributed()"
)

_parts: "WeakValueDictionary[int, Any]" = WeakValueDictionary()
_told: set[str] = set()


def note_parts(parts: Any) -> None:
    """Notes what ``hvdtrain.shard`` or ``tf.data.Dataset.shard`` returns."""
    for each in tf.nest.flatten(parts):
        with contextlib.suppress(TypeError):  # Lists cannot be referred to.
            _parts[id(each)] = each


def is_part(data: Any) -> bool:
    """Whether data is, or is made of, what this rank has taken as its part."""
    flat = tf.nest.flatten(data)
    made_of = [every for each in flat if isinstance(each, tf.data.Dataset) for every in with_inputs(each)]
    return any(id(each) in _parts for each in [*flat, *made_of])


def tell_of_fit(callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """At a ``model.fit`` on several ranks."""
    if not any(getattr(each, "averages_values", False) for each in callbacks):
        _tell(_OF_FIT)


def tell_of_evaluate(x: Any) -> None:
    """At a ``model.evaluate`` without ``hvdtrain.callbacks.distributed``."""
    if is_part(x):
        _tell(_OF_EVALUATE)


def _tell(text: str) -> None:
    if runtime.collectives().rank == 0 and runtime.on_unequal() != "ignore" and text not in _told:
        _told.add(text)
        write(f"hvdtrain: {text}.")
