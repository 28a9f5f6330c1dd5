"""How the GPUs of a job's hosts are shared among its ranks: refusals and warnings."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from hvdtrain.config.wording import option
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.config import GpuConfig
from hvdtrain.distributed.horovod import build_facts
from hvdtrain.errors import JobError, UsageError
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


def require_own_gpus(collectives: Collectives, device: str, config: GpuConfig) -> None:
    """Compares the GPUs of all ranks, which must call it.

    Args:
        device: the device that this rank computes on.

    Raises:
        JobError: on every rank: ranks share a GPU, or only some of them have one, and this is not allowed.
    """
    own = _own_gpus(device)
    (num_with_gpu,) = collectives.sum([np.array([own.num_gpus > 0], np.float32)])
    if not num_with_gpu:
        return
    has_nccl = build_facts()["NCCL"]
    if (reason := refusal(collectives.allgather(own), config, has_nccl=has_nccl)) is not None:
        raise JobError(reason, exit_code=UsageError.exit_code, rank=0)


def refusal(ranks: Sequence[RankGpus], config: GpuConfig, *, has_nccl: bool) -> str | None:
    """Why a job's ranks may not start; None if they may.

    Args:
        has_nccl: whether Horovod reduces with NCCL, for which each rank needs its own GPU, whatever is allowed.
    """
    for rule, find, flag, is_set in (
        ("a GPU if others do", _without_gpu, option("allow_cpu_ranks", True), config.allow_cpu_ranks),
        ("its own GPU", _sharing, option("share_gpus", True), config.share_gpus),
    ):
        if (not is_set or has_nccl) and (found := _of_hosts(ranks, find)):
            condition = ", with a Horovod without NCCL: HOROVOD_GPU_OPERATIONS=none launch/run …" if has_nccl else "."
            return f"each rank must have {rule}. Received: {found[0]} Or set {flag}{condition}"
    return None


def gpu_warnings(collectives: Collectives, device: str) -> list[str]:
    """Warnings about the GPUs of all ranks, which must call it."""
    return warnings_for(collectives.allgather(_own_gpus(device)))


def warnings_for(ranks: Sequence[RankGpus]) -> list[str]:
    """A line for each host whose GPUs are probably not used as intended; none if no host has a GPU."""
    return [*_of_hosts(ranks, _without_gpu), *_of_hosts(ranks, _idle)] if any(rank.num_gpus for rank in ranks) else []


def _own_gpus(device: str) -> RankGpus:
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    return RankGpus(network.host_name(), visible, len(tf.config.list_physical_devices("GPU")), device)


def _of_hosts(ranks: Sequence[RankGpus], find: Callable[[str, Sequence[RankGpus]], str | None]) -> list[str]:
    hosts: dict[str, list[RankGpus]] = {}
    for rank in ranks:
        hosts.setdefault(rank.host, []).append(rank)
    return [found for name, its_ranks in hosts.items() if (found := find(name, its_ranks)) is not None]


def _without_gpu(host: str, ranks: Sequence[RankGpus]) -> str | None:
    without = [rank for rank in ranks if not rank.num_gpus]
    if not without:
        return None
    hidden = sorted({rank.visible for rank in without if rank.visible is not None})
    why = f", because CUDA_VISIBLE_DEVICES={', '.join(hidden)} hides them" if hidden else ""
    remedy = "Unset it there." if hidden else "Leave that host out, or run: launch/run python -m hvdtrain doctor."
    return f"{len(without)} rank(s) on host {host} see no GPU{why}, and delay those that do. {remedy}"


def _num_used(ranks: Sequence[RankGpus]) -> int:
    # A launcher may show each rank its own GPU, under the same number.
    return len({(rank.visible, rank.device) for rank in ranks})


def _sharing(host: str, ranks: Sequence[RankGpus]) -> str | None:
    with_gpu = [rank for rank in ranks if rank.num_gpus]
    if (num_used := _num_used(with_gpu)) == len(with_gpu):
        return None
    return f"{len(with_gpu)} ranks share {num_used} GPU(s) on host {host}. Start {num_used} there."


def _idle(host: str, ranks: Sequence[RankGpus]) -> str | None:
    num_gpus = ranks[0].num_gpus
    if num_gpus <= len(ranks) or any(rank.visible != ranks[0].visible for rank in ranks):
        return None
    return f"{num_gpus - len(ranks)} of {num_gpus} GPUs on host {host} have no rank. Start {num_gpus} there."
