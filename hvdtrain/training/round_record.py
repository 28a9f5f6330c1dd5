"""The record of a run of local SGD without waiting: what each rank did in each round, and when it merged averages."""

from collections.abc import Sequence
from typing import Any

from hvdtrain.distributed.collectives import Collectives
from hvdtrain.errors import UsageError
from hvdtrain.fault_tolerance.collective_errors import on_every_rank, on_first_rank
from hvdtrain.local_sgd.averager import OwnRound
from hvdtrain.training.record_file import RecordFile, read_record


class RoundRecord:
    """Collects this rank's rounds; rank 0 writes a line for each, with the ranks' steps in rank order.

    Args:
        path: of the file.
    """

    def __init__(self, path: str, collectives: Collectives):
        self._collectives = collectives
        self._file = RecordFile(path, collectives.size, "rounds")
        self._own: list[OwnRound] = []

    def start(self, rounds: int) -> None:
        """Continues after this many rounds; see :meth:`RecordFile.start`. All ranks must call it."""
        is_first = self._collectives.rank == 0
        on_every_rank(lambda: self._file.start(rounds) if is_first else None, self._collectives)

    def add(self, own: OwnRound) -> None:
        """Notes a round of this rank."""
        self._own.append(own)

    def write(self) -> None:
        """Writes the rounds since the last call, of which all ranks have noted the same. All ranks must call it."""
        rounds: list[list[OwnRound]] = self._collectives.allgather(self._own)
        self._own = []
        if self._collectives.rank == 0:
            for ranks in zip(*rounds, strict=True):
                self._file.add(ranks)
            self._file.flush()

    def close(self) -> None:
        """Ends the file."""
        self._file.close()


def read_own_rounds(path: str, collectives: Collectives) -> Sequence[OwnRound]:
    """What this rank did in each round of a recorded run. All ranks must call it.

    Raises:
        UsageError: on all ranks: the file cannot be read, or is of a different number of ranks.
    """
    rounds = on_first_rank(lambda: _read_rounds(path, collectives.size), collectives)
    return [OwnRound(*ranks[collectives.rank]) for ranks in rounds]


def _read_rounds(path: str, size: int) -> list[Any]:
    rounds = read_record(path, size)
    if not all(isinstance(ranks, list) and len(ranks) == size and all(map(_is_round, ranks)) for ranks in rounds):
        raise UsageError(
            f"a round must be, for each of {size} ranks, a list of the steps that it made, and of those after which it "
            f"merged an average. Received: others in {path}. Record the run again."
        )
    return rounds


def _is_round(found: Any) -> bool:
    if not isinstance(found, list) or len(found) != 2 or not all(type(each) is int for each in found):
        return False
    steps, merged_after = found
    return steps >= 1 and 0 <= merged_after <= steps
