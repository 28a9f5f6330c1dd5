"""Unreadable samples: a source finds them, feeds leave them out, and a quota limits their number over all ranks."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from hvdtrain.config.wording import option
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.errors import DataError
from hvdtrain.fault_tolerance.collective_errors import on_every_rank
from hvdtrain.system.terminal import report


@dataclasses.dataclass(frozen=True)
class BadSample:
    """A sample that cannot be read or parsed."""

    number: int
    """Its sample number; -1 if it has none."""
    where: str
    """Human-readable: ``/data/a.tfrecord, record 17 at offset 1234 bytes``. Records are counted from 0."""
    cause: str
    """Why it cannot be read or parsed."""


class FindsBadSamples(Protocol):
    """What a source knows about its unreadable samples."""

    @property
    def bad_samples(self) -> Sequence[BadSample]:
        """Bad samples found when the source was opened, the same on all ranks."""

    def find_bad(self, numbers: np.ndarray) -> list[BadSample]:
        """Reads each of these samples separately and returns those that fail."""


class BadSampleQuota:
    """Counts skipped samples and fails when there are too many.

    Args:
        allowed: maximum number of skipped samples over all ranks, training and evaluation together.
    """

    def __init__(self, allowed: int, collectives: Collectives):
        self._allowed = allowed
        self._collectives = collectives
        self._places: set[str] = set()

    @property
    def allows_any(self) -> bool:
        """Whether batches may lack samples, so that losses must be weighted by how many are left."""
        return self._allowed > 0

    def state(self) -> set[str]:
        """Locations of the samples that this rank has counted."""
        return self._places

    def restore(self, places: set[str]) -> None:
        """Adds the samples counted before the run was resumed."""
        self._places |= places

    def note_known(self, bad: Sequence[BadSample]) -> None:
        """Counts samples found when the data was opened, which all ranks know. All ranks must call it.

        Raises:
            JobError: on every rank, if there are more than allowed.
        """
        if self._collectives.rank == 0:
            _log(self._collectives.rank, bad)
        self._places |= {each.where for each in bad}
        on_every_rank(lambda: self._require_allowed(bad), self._collectives)

    def note_found(self, bad: Sequence[BadSample]) -> None:
        """Counts samples that this rank has found.

        Raises:
            DataError: there are more than allowed.
        """
        _log(self._collectives.rank, bad)
        self._places |= {each.where for each in bad}
        self._require_allowed(bad)

    @property
    def num_known(self) -> int:
        """The number of distinct samples of which this rank knows that they are skipped."""
        return len(self._places)

    def total(self) -> int:
        """The number of distinct samples skipped by any rank. Collective: all ranks must call it.

        Raises:
            JobError: on every rank, if there are more than allowed.
        """
        if self.allows_any:
            self._places = set().union(*self._collectives.allgather(self._places))
            if len(self._places) > self._allowed:
                on_every_rank(lambda: self._require_allowed([]), self._collectives)
        return len(self._places)

    def _require_allowed(self, latest: Sequence[BadSample]) -> None:
        if len(self._places) > self._allowed:
            last = f" The last one: {latest[-1].where}: {latest[-1].cause}." if latest else ""
            raise DataError(
                f"the number of unreadable samples must be at most {self._allowed}. Received: {len(self._places)}."
                f"{last} Repair the files, or allow more with {option('bad_samples')}."
            )


class ExcludedSamples:
    """The samples that a feed leaves out, because they could not be read."""

    def __init__(self, source: FindsBadSamples, quota: BadSampleQuota):
        self._source = source
        self._quota = quota
        self.numbers: frozenset[int] = frozenset()

    def exclude_bad(self, numbers: np.ndarray, error: Exception) -> None:
        """Finds the samples that made a batch fail, counts them, and leaves them out from now on.

        Args:
            numbers: the samples of the batch.
            error: what was raised when it was read.

        Raises:
            DataError: more samples are unreadable than allowed.
            Exception: ``error`` itself, if each sample can be read.
        """
        bad = self._source.find_bad(numbers)
        if not bad:
            raise error
        self._quota.note_found(bad)
        self.numbers |= {each.number for each in bad}


def _log(rank: int, bad: Sequence[BadSample]) -> None:
    for each in bad:
        report(rank, f"skipped {each.where}: {each.cause}")
