"""How many batches the data of a ``model.fit`` has, as far as Keras knows."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_noted: ContextVar[list[int | None]] = ContextVar("lengths of a fit")


@contextmanager
def lengths_noted() -> Iterator[None]:
    """In the block, a ``model.fit`` runs."""
    token = _noted.set([])
    try:
        yield
    finally:
        _noted.reset(token)


def note_length(num_batches: int | None) -> None:
    """Keras has made an iterator of data with this number of batches; None: unknown, or infinite."""
    if (lengths := _noted.get(None)) is not None:
        lengths.append(num_batches)


def training_length() -> int | None:
    """The number of batches of the data that the current ``model.fit`` trains on; None: unknown, or infinite."""
    lengths = _noted.get([])
    # Keras makes the iterator of the training data first, before callbacks run.
    return lengths[0] if lengths else None
