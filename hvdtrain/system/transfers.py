"""What this process has moved to and from object stores: progress, while steps wait for it."""

import threading

_lock = threading.Lock()
_count = 0


def note() -> None:
    """Counts an answer of a store, or a part of a file that has been moved."""
    global _count
    with _lock:
        _count += 1


def count() -> int:
    """How often something has been moved so far."""
    return _count
