"""Plain descriptions of Keras objects, which ranks can compare."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_OWN_TO_EACH_RANK = ("name", "seed")
"""Names are numbered by what a rank has made before, and seeds may differ."""


def described(value: Any) -> Any:
    """The value if it is plain, the configuration of a Keras object; of functions and other objects, their name."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping) and {"class_name", "config"} <= set(value):  # as Keras serializes objects
        return {str(value["class_name"]): described(value["config"])}
    if isinstance(value, Mapping):
        return {str(key): described(each) for key, each in value.items() if key not in _OWN_TO_EACH_RANK}
    if isinstance(value, Sequence):
        return [described(each) for each in value]
    if hasattr(value, "get_config") and not isinstance(value, type):
        return {type(value).__name__: configuration(value)}
    return getattr(value, "__name__", type(value).__name__)


def configuration(thing: Any) -> dict[str, Any]:
    """What ``get_config`` of a Keras object returns; nothing if it cannot be called."""
    try:
        config = thing.get_config()
    except Exception:
        return {}
    found = described(config)
    return found if isinstance(found, dict) else {}
