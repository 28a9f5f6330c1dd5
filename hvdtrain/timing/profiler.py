"""A TensorFlow profile of a chosen range of steps."""

from pathlib import Path

import tensorflow as tf

from hvdtrain.errors import UsageError


class Profiler:
    """Profiles the steps ``first`` to ``last`` (from 1, both included); without them, none.

    Args:
        folder: where the profile is written, for TensorBoard's profile plugin; None on a rank that
            only keeps step with the one that profiles.

    Raises:
        UsageError: the range is empty.
    """

    def __init__(self, first: int = 0, last: int = 0, folder: Path | None = None):
        if (first, last) != (0, 0) and not 1 <= first <= last:
            raise UsageError(f"a profile needs 1 <= first step <= last step. Received: {first} and {last}")
        self._first, self._last, self._folder = first, last, folder
        self._runs = False

    @property
    def marks(self) -> list[int]:
        """The steps after which a call has to end."""
        return [self._first - 1, self._last] if self._first else []

    def before(self, step: int) -> None:
        """Told before a call, with the number of steps made so far."""
        if self._folder is not None and not self._runs and self._first - 1 <= step < self._last:
            tf.profiler.experimental.start(str(self._folder))
            self._runs = True

    def after(self, step: int) -> None:
        """Told after a call."""
        if self._runs and step >= self._last:
            self.close()

    def close(self) -> None:
        """Writes what was profiled, where the run ended within the range."""
        if self._runs:
            tf.profiler.experimental.stop()
            self._runs = False
