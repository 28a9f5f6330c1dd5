"""Layers with an ``adapt`` method, such as Normalization: not all of their state is in variables."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.distributed.agreement import ranks_text
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.distinct_values import gather_distinct, most_common
from hvdtrain.errors import DivergenceError
from hvdtrain.seams import keras_internals
from hvdtrain.system import network
from hvdtrain.system.terminal import report, some_of

_VOCABULARY, _IDF_WEIGHTS = "get_vocabulary()", "idf_weights"
_PLAIN = (bool, int, float, str, bytes, np.ndarray, np.generic)


def share_adapted_layers(model: keras.Model, collectives: Collectives) -> None:
    """Copies the state of rank 0's layers to all ranks; all must call it after the broadcast of variables.

    Lookup tables, and attributes that are numbers, strings, arrays or lists of these: Keras' layers with ``adapt`` have
    no other state, and a user's own should have none. If they differed, rank 0 says so: one
    process would have adapted them to the data of all ranks.

    Raises:
        DivergenceError: on every rank: vocabularies have different sizes, on which the model's shapes depend.
    """
    layers = _adaptable(model)
    if not layers or collectives.size == 1:
        return
    names = names_of(layers)
    own = [_state(layer) for layer in layers]
    first = collectives.allgather(own if collectives.rank == 0 else None)[0]
    everyone = collectives.allgather([(len(each.get(_VOCABULARY, [])), _digest(_digests(each))) for each in own])
    for i, layer in enumerate(layers):
        sizes = [each[i][0] for each in everyone]
        if len(set(sizes)) > 1 and layer.output_mode != "int" and not layer.pad_to_max_tokens:
            found = some_of([f"{size} on rank {rank}" for rank, size in enumerate(sizes)])
            raise DivergenceError(
                f"replicas must be equal. The number of words of layer {names[i]!r}, on which shapes depend, is "
                f"{found}. Adapt it on the same data on every rank."
            )
    differing = sorted({names[i] for i in range(len(layers)) if len({each[i][1] for each in everyone}) > 1})
    if differing and collectives.rank == 0:
        report(
            0,
            f"ranks have adapted {some_of([repr(name) for name in differing])} to different data, such as their parts "
            "from hvdtrain.shard. All ranks now use what rank 0 found in its part, where one process would have used "
            "all of the data: adapt layers before hvdtrain.shard.",
        )
    for layer, before, state in zip(layers, own, first, strict=True):
        _assign(layer, before, state)


def require_equal_adapted_layers(model: keras.Model, collectives: Collectives, step: int) -> None:
    """Compares the state of layers with ``adapt``; all ranks must call it.

    Raises:
        DivergenceError: on every rank, naming the rank, the layer and the attribute that differ.
    """
    layers = _adaptable(model)
    if not layers or collectives.size == 1:
        return
    own = [_digests(_state(layer)) for layer in layers]
    states = gather_distinct(own, collectives)
    if all(each == states[0] for each in states):
        return
    hosts = collectives.allgather(network.host_name())
    for i, layer_name in enumerate(names_of(layers)):
        for name in sorted({name for each in states for name in each[i]}):
            values = [each[i].get(name, b"") for each in states]
            usual = most_common(values)
            others = [rank for rank, value in enumerate(values) if value != usual]
            if others:
                raise DivergenceError(
                    f"replicas must be equal. At step {step} {name} of layer {layer_name!r} of "
                    f"{ranks_text(others, hosts)} differs from the other ranks'. Adapt layers before "
                    "hvdtrain.broadcast(model), which copies rank 0's state to all ranks."
                )


def _adaptable(model: keras.Model) -> list[keras.layers.Layer]:
    return [layer for layer in keras_internals.FLATTEN_LAYERS.of(model)() if hasattr(layer, "adapt")]


def names_of(layers: Sequence[keras.layers.Layer]) -> list[str]:
    """Names for messages: a lookup that is part of a TextVectorization has the name of that, which users know."""
    names: dict[int, str] = {}
    for layer in layers:
        for part in keras_internals.FLATTEN_LAYERS.of(layer)():
            names.setdefault(id(part), layer.name)
    return [names[id(layer)] for layer in layers]


def digest_of(layer: keras.layers.Layer) -> bytes:
    """A digest of what a layer and its parts have been adapted to."""
    return _digest([_digests(_state(each)) for each in keras_internals.FLATTEN_LAYERS.of(layer)()])


def _state(layer: Any) -> dict[str, Any]:
    state = {name: _plain(value) for name, value in vars(layer).items() if not name.startswith("_") and name != "name"}
    state = {name: value for name, value in state.items() if value is not None}
    if isinstance(layer, keras.layers.IntegerLookup | keras.layers.StringLookup) and int(layer.lookup_table.size()):
        vocabulary = layer.get_vocabulary(include_special_tokens=False)
        state[_VOCABULARY] = [str(each) if isinstance(each, str) else int(each) for each in vocabulary]
        if layer.output_mode == "tf_idf":
            first = layer.vocabulary_size() - len(vocabulary)
            state[_IDF_WEIGHTS] = layer.idf_weights.numpy()[first : first + len(vocabulary)]
    return state


def _assign(layer: Any, before: Mapping[str, Any], state: dict[str, Any]) -> None:
    """Replaces what differs, so that attributes keep their types and objects wherever they can."""
    changed = {name: value for name, value in state.items() if _digest(value) != _digest(before.get(name))}
    if _VOCABULARY in changed or _IDF_WEIGHTS in changed:
        layer.set_vocabulary(state[_VOCABULARY], idf_weights=state.get(_IDF_WEIGHTS))
    for name, value in changed.items():
        if name not in (_VOCABULARY, _IDF_WEIGHTS):
            current = vars(layer).get(name)
            setattr(layer, name, tf.constant(value, current.dtype) if tf.is_tensor(current) else value)


def _plain(value: Any) -> Any:
    """The value if it can be sent and compared, a tensor as an array; None if not."""
    if isinstance(value, keras.Variable | tf.Variable):
        return None  # broadcast and compared with the model's other variables
    if tf.is_tensor(value):
        return value.numpy() if hasattr(value, "numpy") else None
    if isinstance(value, list | tuple):
        # A new list: Keras' own kind cannot be sent.
        plain: Any = list(value) if isinstance(value, list) else tuple(value)
        return plain if all(isinstance(each, _PLAIN) for each in value) else None
    return value if isinstance(value, _PLAIN) else None


def _digests(state: Mapping[str, Any]) -> dict[str, bytes]:
    return {name: _digest(value) for name, value in sorted(state.items())}


def _digest(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        content = f"{value.dtype} {value.shape}".encode() + np.ascontiguousarray(value).tobytes()
    else:
        content = repr(value).encode()
    return hashlib.sha256(content).digest()
