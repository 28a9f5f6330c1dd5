"""Refuses to train when ranks were started with different options, code, data or models."""

from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.distinct_values import gather_distinct
from hvdtrain.errors import DisagreementError
from hvdtrain.system import network
from hvdtrain.system.terminal import some_of

_MAX_DIFFERENCES = 5


def require_agreement(
    what: str,
    facts: Mapping[str, Any],
    collectives: Collectives,
    *,
    remedy: str = "Start every rank with the same command, code and files.",
) -> None:
    """Compares facts over ranks; all ranks must call it.

    Raises:
        DisagreementError: on every rank, with the differences, if a fact is not the same everywhere.
    """
    if found := differences(facts, collectives):
        raise DisagreementError(f"all ranks must have the same {what}. Received: {found}. {remedy}")


def differences(facts: Mapping[str, Any], collectives: Collectives) -> str:
    """Which facts differ between ranks, for a message; empty if none does. All ranks must call it."""
    all_facts = gather_distinct({key: repr(value) for key, value in facts.items()}, collectives)
    if all(each == all_facts[0] for each in all_facts):
        return ""
    hosts = collectives.allgather(network.host_name())
    found = []
    for key in sorted({key for each in all_facts for key in each}):
        by_value: dict[str, list[int]] = {}
        for rank, each in enumerate(all_facts):
            by_value.setdefault(each.get(key, "missing"), []).append(rank)
        if len(by_value) > 1:
            values = ", ".join(f"{value} on {ranks_text(ranks, hosts)}" for value, ranks in by_value.items())
            found.append(f"{key}: {values}")
    num_more = len(found) - _MAX_DIFFERENCES
    return "; ".join(found[:_MAX_DIFFERENCES]) + (f"; and {num_more} more" if num_more > 0 else "")


def require_same_call(name: str, collectives: Collectives) -> None:
    """Call it first in what all ranks must call: a rank that calls something else would not be waited for in vain.

    Raises:
        DisagreementError: on every rank, if others have called something else that compares ranks first.
    """
    require_agreement("call", {"call": name}, collectives, remedy=f"Call {name} on every rank, not on some.")


def ranks_text(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """``ranks 1, 3``, with their hosts if the job has several.

    Args:
        hosts: the host of each rank of the job.
    """
    named = f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + some_of([*map(str, ranks)])
    if len(set(hosts)) == 1:
        return named
    theirs = list(dict.fromkeys(hosts[rank] for rank in ranks))
    return f"{named} (host{'s' if len(theirs) > 1 else ''} {some_of(theirs)})"
