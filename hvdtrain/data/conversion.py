"""Conversion of samples to one data type, without losing values."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdtrain.errors import DataError

_TEXT = "OSU"


def common_dtype(dtypes: Sequence[np.dtype]) -> np.dtype:
    """The widest of these; floating-point if one is, as when only some values have decimals."""
    floating = [each for each in dtypes if each.kind == "f"]
    return max(floating or dtypes, key=lambda each: each.itemsize)


def converted(value: Any, dtype: Any, what: str) -> np.ndarray:
    """A value as an array of this data type.

    Args:
        what: the value in a message: ``sample 3``.

    Raises:
        DataError: it would lose decimals, or digits of a whole number.
    """
    wanted = np.dtype(dtype)
    if wanted.kind in _TEXT:
        return np.asarray(value, wanted)
    own = np.asarray(value)
    if own.dtype == wanted:
        return own
    if not np.can_cast(own.dtype, wanted, "same_kind"):
        raise DataError(
            f"all samples must have the data types of the first ones. Received: {own.dtype} in {what}, {wanted} in the "
            "first. Convert all to one type."
        )
    found = own.astype(wanted)
    if own.dtype.kind in "iu" and not np.array_equal(found.astype(own.dtype), own):
        raise DataError(
            f"whole numbers must fit their data type. Received: {own.dtype} in {what}, with values that {wanted} "
            "cannot hold. Scale them, or use a wider type."
        )
    return found
