"""How the GPUs of the job's hosts are shared among its ranks, and warnings about it."""

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from hvdtrain.distributed import runtime
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.system import environment, network


@dataclasses.dataclass(frozen=True)
class RankGpus:
    """The GPUs that one rank sees and uses."""

    host: str
    visible: str | None
    """``CUDA_VISIBLE_DEVICES``; None: not set."""
    num_gpus: int
    """Number of GPUs that it sees."""
    device: str
    """``GPU:1`` or ``CPU``."""


def gpu_warnings(collectives: Collectives) -> list[str]:
    """Warnings about the GPUs of all ranks; all ranks must call it."""
    own = RankGpus(
        network.host_name(),
        environment.get("CUDA_VISIBLE_DEVICES"),
        len(tf.config.list_physical_devices("GPU")),
        runtime.current().topology.device,
    )
    return warnings_for(collectives.allgather(own))


def warnings_for(ranks: Sequence[RankGpus]) -> list[str]:
    """A line for each host whose GPUs are probably not used as intended; none if no host has a GPU."""
    if not any(rank.num_gpus for rank in ranks):
        return []
    hosts: dict[str, list[RankGpus]] = {}
    for rank in ranks:
        hosts.setdefault(rank.host, []).append(rank)
    found = [_warning(f"host {name}", its_ranks) for name, its_ranks in hosts.items()]
    return [warning for warning in found if warning is not None]


def _warning(host: str, ranks: Sequence[RankGpus]) -> str | None:
    without = [rank for rank in ranks if not rank.num_gpus]
    if without:
        hidden = sorted({rank.visible for rank in without if rank.visible is not None})
        why = f", because CUDA_VISIBLE_DEVICES={', '.join(hidden)} hides them" if hidden else ""
        remedy = "Unset it there." if hidden else "Leave that host out, or run: launch/run python -m hvdtrain doctor"
        return f"{len(without)} rank(s) on {host} see no GPU{why}, and delay those that do. {remedy}"
    # A launcher may show each rank a GPU of its own, under the same number.
    num_used = len({(rank.visible, rank.device) for rank in ranks})
    if num_used < len(ranks):
        return f"{len(ranks)} ranks share {num_used} GPU(s) on {host}. Start {num_used} there."
    num_gpus = ranks[0].num_gpus
    if num_gpus > len(ranks) and all(rank.visible == ranks[0].visible for rank in ranks):
        return f"{num_gpus - len(ranks)} of {num_gpus} GPUs on {host} have no rank. Start {num_gpus} there."
    return None
