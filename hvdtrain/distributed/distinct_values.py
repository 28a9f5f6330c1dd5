"""Gathers values that are usually equal on all ranks: as digests, and only distinct values whole.

The result of an allgather of what thousands of ranks have in common, such as the description of a model, would grow
with the number of ranks.
"""

import collections
import hashlib
import pickle
from collections.abc import Hashable, Sequence
from typing import Any, TypeVar

from hvdtrain.distributed.collectives import Collectives

T = TypeVar("T", bound=Hashable)


def gather_distinct(value: Any, collectives: Collectives) -> list[Any]:
    """The picklable value of each rank, in rank order; equal values are sent once, or not at all if all are equal.

    All ranks must call it.
    """
    digest = hashlib.sha256(pickle.dumps(value)).digest()
    digests = collectives.allgather(digest)
    first_ranks: dict[bytes, int] = {}
    for rank, each in enumerate(digests):
        first_ranks.setdefault(each, rank)
    if len(first_ranks) == 1:
        return [value] * len(digests)
    values = collectives.allgather(value if first_ranks[digest] == collectives.rank else None)
    return [values[first_ranks[each]] for each in digests]


def most_common(values: Sequence[T]) -> T:
    """The value that most ranks have; among equally many, that of the lowest rank."""
    # A counter keeps the order of its first encounters.
    return collections.Counter(values).most_common(1)[0][0]
