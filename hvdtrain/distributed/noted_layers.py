"""Layers that a program adapts, also those that prepare samples and are in no model."""

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import keras

from hvdtrain.distributed.adapted_layers import digest_of, names_of

_layers: "list[weakref.ref[keras.layers.Layer]]" = []
_digests: "weakref.WeakKeyDictionary[keras.layers.Layer, bytes]" = weakref.WeakKeyDictionary()
"""Of layers that have not changed since: that of a large vocabulary takes a while."""


class Noted(NamedTuple):
    """A layer that has been adapted, or given a vocabulary."""

    name: str
    state: bytes
    """A digest; empty if the layer is gone."""


def noted() -> list[Noted]:
    """The layers in the order in which they were adapted first."""
    layers = [each() for each in _layers]
    alive = [each for each in layers if each is not None]
    names = dict(zip(map(id, alive), names_of(alive), strict=True))
    for each in alive:
        if each not in _digests:
            _digests[each] = digest_of(each)
    return [Noted("", b"") if each is None else Noted(names[id(each)], _digests[each]) for each in layers]


def _noting(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def note_and_call(self: keras.layers.Layer, *arguments: Any, **named: Any) -> Any:
        if not any(each() is self for each in _layers):
            _layers.append(weakref.ref(self))
        _digests.pop(self, None)
        return method(self, *arguments, **named)

    return note_and_call


for _kind in (keras.layers.Normalization, keras.layers.Discretization, keras.layers.TextVectorization):
    _kind.adapt = _noting(_kind.adapt)
for _kind in (keras.layers.StringLookup, keras.layers.IntegerLookup):
    _kind.adapt = _noting(_kind.adapt)
    _kind.set_vocabulary = _noting(_kind.set_vocabulary)
