"""How the GPUs of a job's hosts are shared out among its ranks, and what a person should know about it."""

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from hvdtrain import process, runtime
from hvdtrain.collectives import Collectives


@dataclasses.dataclass(frozen=True)
class RankGpus:
    """What one rank sees and takes."""

    host: str
    visible: str | None
    """``CUDA_VISIBLE_DEVICES``; None: not set."""
    num_gpus: int
    """That it sees."""
    device: str
    """``GPU:1`` or ``CPU``."""


def look(collectives: Collectives) -> list[str]:
    """Notes on the GPUs of all ranks; every rank has to call it."""
    own = RankGpus(
        process.host_name(),
        process.settings().get("CUDA_VISIBLE_DEVICES"),
        len(tf.config.list_physical_devices("GPU")),
        runtime.current().topology.device,
    )
    return notes(collectives.allgather(own))


def notes(ranks: Sequence[RankGpus]) -> list[str]:
    """A line for each host that is probably not as it was meant; none where no host has a GPU."""
    if not any(rank.num_gpus for rank in ranks):
        return []
    hosts: dict[str, list[RankGpus]] = {}
    for rank in ranks:
        hosts.setdefault(rank.host, []).append(rank)
    found = [_note(f"host {name}", its_ranks) for name, its_ranks in hosts.items()]
    return [note for note in found if note is not None]


def _note(host: str, ranks: Sequence[RankGpus]) -> str | None:
    without = [rank for rank in ranks if not rank.num_gpus]
    if without:
        hidden = sorted({rank.visible for rank in without if rank.visible is not None})
        why = f", for CUDA_VISIBLE_DEVICES={', '.join(hidden)} hides them" if hidden else ""
        remedy = "Unset it there." if hidden else "Leave that host out, or see: launch/run python -m hvdtrain doctor"
        return f"{len(without)} rank(s) on {host} see no GPU{why}, and hold up those that do. {remedy}"
    # A launcher may show each rank a GPU of its own, under the same number.
    num_taken = len({(rank.visible, rank.device) for rank in ranks})
    if num_taken < len(ranks):
        return f"{len(ranks)} ranks share {num_taken} GPU(s) on {host}. Start {num_taken} there."
    num_gpus = ranks[0].num_gpus
    if num_gpus > len(ranks) and all(rank.visible == ranks[0].visible for rank in ranks):
        return f"{num_gpus - len(ranks)} of {num_gpus} GPUs on {host} have no rank. Start {num_gpus} there."
    return None
