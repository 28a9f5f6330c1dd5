"""Who contributed to each update, read from a record to repeat the run."""

from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.training.quorum.ledger import Contributors
from hvdtrain.training.record_file import read_record


def read_contributions(path: str, num_ranks: int) -> list[Contributors]:
    """The contributors of each update in a file of :class:`~hvdtrain.training.record_file.RecordFile`.

    Raises:
        UsageError: it cannot be read, or is of a different number of ranks.
    """
    found = read_record(path, num_ranks)
    if not all(_are_ranks(each, num_ranks) for each in found):
        raise UsageError(
            f"contributions must be lists of ranks below {num_ranks}, in order and each once. Received: others in "
            f"{path}. Record the run again."
        )
    return [tuple(each) for each in found]


def _are_ranks(found: Any, num_ranks: int) -> bool:
    if not isinstance(found, list) or not found or not all(type(each) is int for each in found):
        return False
    return found == sorted(set(found) & set(range(num_ranks)))
