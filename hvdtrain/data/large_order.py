"""A random order of any number of samples that is computed on access instead of held in memory.

A Feistel network permutes the numbers of ``2 * bits`` binary digits: each round replaces one half by the other one,
changed by a keyed hash of the first. Numbers outside the range are permuted again until they are inside ("cycle
walking"); the network permutes at most four times the number of samples, so that this takes at most four attempts on
average. See Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002.
"""

import numpy as np

_ROUNDS = 8


class LargeOrder:
    """A permutation of the numbers below ``size``.

    Args:
        key: determines the permutation; None: the numbers in their own order.
    """

    def __init__(self, size: int, key: tuple[int, ...] | None):
        self._size = size
        self._is_shuffled = key is not None
        # Of half a number, so that both halves together hold every number.
        self._bits = np.uint64(((size - 1).bit_length() + 1) // 2)
        self._mask = np.uint64((1 << int(self._bits)) - 1)
        self._keys = np.random.SeedSequence(key or ()).generate_state(_ROUNDS, np.uint64)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, positions: slice | np.ndarray) -> np.ndarray:
        """The sample numbers at these positions, int64."""
        if isinstance(positions, slice):
            positions = np.arange(*positions.indices(self._size))
        if not self._is_shuffled:
            return positions.astype(np.int64)
        numbers = self._permuted(positions.astype(np.uint64))
        while (outside := numbers >= self._size).any():
            numbers[outside] = self._permuted(numbers[outside])
        return numbers.astype(np.int64)

    def _permuted(self, numbers: np.ndarray) -> np.ndarray:
        left, right = numbers >> self._bits, numbers & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mixed(right ^ key) & self._mask)
        return left << self._bits | right


def _mixed(values: np.ndarray) -> np.ndarray:
    """SplitMix64's hash: every bit of the result depends on every bit of the value."""
    values = values * np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)
