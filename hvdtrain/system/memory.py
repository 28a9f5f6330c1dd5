"""The memory of this machine."""

import psutil


def available_bytes() -> int:
    """How much memory processes can still use without swapping."""
    return int(psutil.virtual_memory().available)
