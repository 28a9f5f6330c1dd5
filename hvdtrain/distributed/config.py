"""Options of the runtime of a rank, and of the gradient reduction."""

import dataclasses
from typing import Literal

from cyclopts import Parameter

from hvdtrain.config.fields import Config, broken_rule, help_group, require

POWER_SGD = "powersgd"


@Parameter(name="*", group=help_group("GPUs"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuConfig(Config):
    """How ranks use the GPUs of their hosts: by default, each has one for itself."""

    gpu_memory: int | None = None
    """MiB of GPU memory that a rank may use (default: as much as it needs)."""
    share_gpus: bool = False
    """Allow several ranks on one GPU."""
    allow_cpu_ranks: bool = False
    """Allow ranks without a GPU in a job in which others have one."""
    log_device_placement: bool = False
    """Print the device of each operation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "gpu_memory", lambda value: value >= 1, "at least 1")


@Parameter(name="*", group=help_group("Runtime"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class RuntimeConfig(Config):
    """How Horovod and TensorFlow are started on each rank."""

    threads: int | None = None
    """Compute threads per rank (default: a fair share of the host's cores)."""
    deterministic: bool = False
    """Make runs bit-identical: deterministic operations, and sums in a fixed order."""
    timeline: str | None = None
    """File for Horovod's timeline of all reductions, for chrome://tracing."""
    gpus: GpuConfig = dataclasses.field(default_factory=GpuConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "threads", lambda value: 1 <= value <= 4096, "from 1 to 4096")


@Parameter(name="*", group=help_group("Gradient reduction"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class ReductionConfig(Config):
    """How the gradients of all ranks are combined."""

    op: Literal["average", "sum", "adasum"] = "average"
    """How the gradients of the ranks are combined."""
    compression: str = "none"
    """Compression of gradients on the network, with error feedback: none, fp16, or powersgd:RANK."""
    compression_after: int = 0
    """Steps whose gradients are sent uncompressed before --compression begins."""
    groups: int | None = None
    """Number of gradient buckets (default: large gradients alone, small ones together up to 1 MiB)."""
    sparse_as_dense: bool = False
    """Reduce the gradients of embeddings as dense tensors: less traffic if batches use most rows; same updates."""
    shard_optimizer: bool = False
    """Keep the optimizer's state of 1/N of every variable on each of N ranks (ZeRO stage 1); same updates."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "groups", lambda value: value >= 1, "at least 1")
        parse_compression(self.compression)
        require(self, "compression_after", lambda value: value >= 0, "at least 0")

    @property
    def is_linear(self) -> bool:
        """Whether the result is the ranks' mean or sum.

        Only then can gradients share a bucket, the rows of sparse gradients be gathered, and losses be combined.
        """
        return self.op in ("average", "sum")


def parse_compression(text: str) -> tuple[str, int]:
    """The name and the rank of a compression: ``powersgd:4`` -> ``("powersgd", 4)``; the rank of others is 0.

    Raises:
        UsageError: there is no such compression.
    """
    name, colon, rank = text.partition(":")
    if name == POWER_SGD and rank.isascii() and rank.isdigit() and 1 <= int(rank) <= 1024:
        return name, int(rank)
    if colon or name not in ("none", "fp16"):
        raise broken_rule("compression", "none, fp16, or powersgd:RANK with a rank from 1 to 1024", text)
    return name, 0
