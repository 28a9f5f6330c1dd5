"""How messages name options: as flags while a command runs, as arguments in Python."""

import contextlib
from collections.abc import Iterator
from typing import Any

_names_flags = False

# The value of an option that a message does not show.
ANY = object()


@contextlib.contextmanager
def naming_flags() -> Iterator[None]:
    """In the block, in which a command runs, messages name flags."""
    global _names_flags
    before, _names_flags = _names_flags, True
    try:
        yield
    finally:
        _names_flags = before


def flag_of(name: str) -> str:
    """``batch_size`` -> ``--batch-size``."""
    return "--" + name.replace("_", "-")


def option(name: str, value: Any = ANY, *, argument: str | None = None) -> str:
    """An option, with a value or without: ``--mode local`` or ``mode='local'``; ``--overlap`` or ``overlap=True``.

    Args:
        argument: its name in Python, if that differs.
    """
    if not _names_flags:
        name = argument or name
        return name if value is ANY else f"{name}={value!r}"
    if value is ANY or value is True:
        return flag_of(name)
    return f"--no-{name.replace('_', '-')}" if value is False else f"{flag_of(name)} {value}"
