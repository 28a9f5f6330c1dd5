"""Compares the samples that ranks train on: ranks should have divided them, without any that several ranks have."""

from collections import Counter
from collections.abc import Sequence

from hvdtrain.distributed.noted_samples import NotedSamples

_UNDIVIDED = (
    "every rank trains on all of the {number:,} samples, and not on a part of them. {size} ranks make {size} times the "
    "steps of one process in an epoch; with steps_per_epoch, they see some samples several times, and others never. "
    "Pass the data through hvdtrain.shard."
)
_OVERLAPPING = (
    "the ranks' parts of the data overlap: several ranks train on {share:.0%} of the samples, and other samples may be "
    "in no part. Shuffle data with the same seed on all ranks before it is divided, or pass all of it through "
    "hvdtrain.shard."
)
# Below these, samples may be equal by chance.
_MIN_SHARE, _MIN_NUMBER = 0.05, 5


def overlap_of(everyone: Sequence[NotedSamples | None]) -> str | None:
    """What is wrong with how ranks have divided the samples of ``model.fit``; None: nothing that can be seen."""
    known = [each for each in everyone if each is not None]
    return _overlap(known) if len(known) == len(everyone) else None


def _overlap(everyone: Sequence[NotedSamples]) -> str | None:
    first = everyone[0]
    # The parts of samples that occur often may be equal, too.
    if all(each == first for each in everyone) and first.num_distinct >= max(_MIN_NUMBER, first.number / 2):
        return _UNDIVIDED.format(number=first.number, size=len(everyone))
    ranks = Counter(digest for each in _comparable(everyone) for digest in each)
    number = sum(num_ranks > 1 for num_ranks in ranks.values())
    share = number / max(1, len(ranks))
    repeated = 1 - sum(each.num_distinct for each in everyone) / sum(each.number for each in everyone)
    # If equal samples were divided, one of so many pairs as there are ranks came to the same rank.
    is_by_chance = share <= 4 * len(everyone) * repeated
    is_overlap = number >= _MIN_NUMBER and share >= _MIN_SHARE and not is_by_chance
    return _OVERLAPPING.format(share=share) if is_overlap else None


def _comparable(everyone: Sequence[NotedSamples]) -> list[list[bytes]]:
    """Those digests of each that all others would have kept, too, if they had them."""
    complete = [each.num_distinct == len(each.kept) for each in everyone]
    limits = [each.kept[-1] for each, is_complete in zip(everyone, complete, strict=True) if not is_complete]
    limit = min(limits, default=None)
    return [[digest for digest in each.kept if limit is None or digest <= limit] for each in everyone]
