"""Samples that cannot be read: told, left out, and counted against a quota over all ranks."""

from collections.abc import Sequence

from hvdtrain.collectives import Collectives
from hvdtrain.data.source import BadSample
from hvdtrain.errors import DataError
from hvdtrain.failure import on_every_rank, tell


class BadSampleQuota:
    """Counts the samples that are left out.

    Args:
        allowed: how many, over all ranks, training and evaluation together.
    """

    def __init__(self, allowed: int, collectives: Collectives):
        self._allowed = allowed
        self._collectives = collectives
        self._places: set[str] = set()

    @property
    def places(self) -> set[str]:
        """Where those are that this rank has counted."""
        return self._places

    def restore(self, places: set[str]) -> None:
        """Counts those of an earlier part of the run, too."""
        self._places |= places

    def note_known(self, bad: Sequence[BadSample]) -> None:
        """Counts what every rank knows of since the data was opened. Every rank has to call it.

        Raises:
            JobError: on every rank, where there are more than allowed.
        """
        if self._collectives.rank == 0:
            _tell(self._collectives.rank, bad)
        self._places |= {each.where for each in bad}
        on_every_rank(lambda: self._require_allowed(bad), self._collectives)

    def note_found(self, bad: Sequence[BadSample]) -> None:
        """Counts what this rank has found.

        Raises:
            DataError: there are more than allowed.
        """
        _tell(self._collectives.rank, bad)
        self._places |= {each.where for each in bad}
        self._require_allowed(bad)

    def total(self) -> int:
        """Those of all ranks, each once, whichever ranks have met it. Every rank has to call it.

        Raises:
            JobError: on every rank, where there are more than allowed.
        """
        if self._allowed:
            self._places = set().union(*self._collectives.allgather(self._places))
            if len(self._places) > self._allowed:
                on_every_rank(lambda: self._require_allowed([]), self._collectives)
        return len(self._places)

    def _require_allowed(self, latest: Sequence[BadSample]) -> None:
        if len(self._places) > self._allowed:
            last = f" The last one: {latest[-1].where}: {latest[-1].cause}." if latest else ""
            raise DataError(
                f"at most {self._allowed} samples may be unreadable. Received: {len(self._places)}.{last} Mend the "
                "files, or allow more with --bad-samples."
            )


def _tell(rank: int, bad: Sequence[BadSample]) -> None:
    for each in bad:
        tell(rank, f"left out {each.where}: {each.cause}")
