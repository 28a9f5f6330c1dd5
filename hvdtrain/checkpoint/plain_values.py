"""Converts nested plain values to JSON and back; arrays are stored separately, bit-identical, with the tensors."""

from collections.abc import Mapping
from typing import Any

import numpy as np

_SCALARS = (str, int, float, bool, type(None))


def is_plain(value: Any) -> bool:
    """Whether :func:`split` accepts a value: a number, string, None, array, or list, tuple, set or dict of these."""
    if isinstance(value, Mapping):
        return type(value) is dict and all(isinstance(key, str) and is_plain(each) for key, each in value.items())
    if type(value) in (list, tuple, set, frozenset):
        return all(is_plain(each) for each in value)
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.kind in "biuf"
    return isinstance(value, _SCALARS)


def split(value: Any, arrays: dict[str, np.ndarray], prefix: str) -> Any:
    """Returns the value for JSON; stores each array in ``arrays`` under ``prefix`` and a number."""
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


def array_names(value: Any) -> list[str]:
    """Returns the names of the arrays in a value that :func:`split` returned; raises what :func:`join` raises."""
    names: list[str] = []

    class Names(dict[str, Any]):
        def __missing__(self, name: str) -> None:
            names.append(name)

    join(value, Names())
    return names


def join(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Returns the value that was passed to :func:`split`."""
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
