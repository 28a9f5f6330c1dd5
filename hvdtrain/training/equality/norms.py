"""Norms of large arrays, computed in double precision without a copy of them."""

import numpy as np

_BLOCK = 1 << 16
"""Elements that are converted at a time."""


def norm(array: np.ndarray, minus: np.ndarray | None = None) -> float:
    """The Euclidean norm of an array, or of the difference of two of the same shape."""
    flat, other = np.ravel(array), None if minus is None else np.ravel(minus)
    total = 0.0
    for start in range(0, len(flat), _BLOCK):
        block = flat[start : start + _BLOCK].astype(np.float64)
        if other is not None:
            block -= other[start : start + _BLOCK]
        total += float(block @ block)
    return float(np.sqrt(total))
