"""Nested plain values as JSON, their arrays apart: arrays keep their bits and go where tensors go."""

from collections.abc import Mapping
from typing import Any

import numpy as np

_SCALARS = (str, int, float, bool, type(None))


def is_plain(value: Any) -> bool:
    """True for what :func:`split` takes: numbers, texts, None, arrays, and lists, tuples, sets and dicts of these."""
    if isinstance(value, Mapping):
        return type(value) is dict and all(isinstance(key, str) and is_plain(each) for key, each in value.items())
    if type(value) in (list, tuple, set, frozenset):
        return all(is_plain(each) for each in value)
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.kind in "biuf"
    return isinstance(value, _SCALARS)


def split(value: Any, arrays: dict[str, np.ndarray], prefix: str) -> Any:
    """The value for JSON; each array is put into ``arrays`` under ``prefix`` and a number."""
    if isinstance(value, dict):
        return {"dict": {key: split(each, arrays, prefix) for key, each in value.items()}}
    for kind in (list, tuple, set, frozenset):
        if type(value) is kind:
            members = sorted(value) if kind in (set, frozenset) else value
            return {kind.__name__: [split(each, arrays, prefix) for each in members]}
    if isinstance(value, np.ndarray | np.generic):
        name = f"{prefix}/{len(arrays)}"
        arrays[name] = np.asarray(value)
        return {"array": name}
    assert isinstance(value, _SCALARS), type(value)
    return value


def join(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """What :func:`split` was given."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "array":
        return arrays[content]
    if kind == "dict":
        return {key: join(each, arrays) for key, each in content.items()}
    return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind](
        join(each, arrays) for each in content
    )
