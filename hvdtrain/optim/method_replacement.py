"""Replaces methods of objects for a time."""

from collections.abc import Callable
from typing import Any


def replace_method(owner: Any, name: str, method: Callable[..., Any]) -> Callable[[], None]:
    """Replaces a method of an object; returns what restores it."""
    before = vars(owner).get(name)
    setattr(owner, name, method)

    def restore() -> None:
        if before is None:
            del vars(owner)[name]  # The class' own is visible again.
        else:
            setattr(owner, name, before)

    return restore
