"""Replaces methods of objects and classes for a time."""

from collections.abc import Callable
from typing import Any


def replace_method(owner: Any, name: str, method: Callable[..., Any]) -> Callable[[], None]:
    """Replaces a method of an object or a class; returns what restores it."""
    before = vars(owner).get(name)
    setattr(owner, name, method)

    def restore() -> None:
        if before is not None:
            setattr(owner, name, before)
        elif isinstance(owner, type):
            delattr(owner, name)
        else:
            del vars(owner)[name]  # The class' own is visible again.

    return restore
