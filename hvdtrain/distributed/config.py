"""Options of the runtime of a rank, and of the gradient reduction."""

import dataclasses
from typing import Literal

from cyclopts import Parameter

from hvdtrain.config.fields import Config, help_group, require
from hvdtrain.errors import UsageError


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

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "threads", lambda value: 1 <= value <= 4096, "from 1 to 4096")


@Parameter(name="*", group=help_group("Gradient reduction"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class ReductionConfig(Config):
    """How the gradients of all ranks are combined."""

    op: Literal["average", "sum", "adasum"] = "average"
    """How the gradients of the ranks are combined."""
    compression: Literal["none", "fp16"] = "none"
    """Compression of gradients on the network."""
    groups: int | None = None
    """Number of gradient buckets (default: large gradients alone, small ones together up to 1 MiB)."""
    sparse_as_dense: bool = False
    """Reduce the gradients of embeddings as dense tensors: less traffic if batches use most rows; same updates."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "groups", lambda value: value >= 1, "at least 1")
        if self.groups is not None and self.op == "adasum":
            raise UsageError(
                f"--op adasum reduces each gradient alone. Received: --groups {self.groups}. Leave it out."
            )
