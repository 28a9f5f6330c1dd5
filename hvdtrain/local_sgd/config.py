"""Options of local SGD."""

import dataclasses
from typing import Literal

from cyclopts import Parameter

from hvdtrain.config.fields import Config, help_group, require
from hvdtrain.config.wording import option


@Parameter(name="*", group=help_group("Local SGD (--mode local)"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalSGDConfig(Config):
    """Local SGD: each rank trains its own replica, and parameters are averaged periodically (Stich, arXiv:1805.09767).

    Sources: ``adacomm``: Wang and Joshi, arXiv:1810.08313; ``nesterov``: DiLoCo, arXiv:2311.08105, and SlowMo,
    arXiv:1910.00643; ``sync_dtype``, ``fragments``, ``fragment_delay`` and ``merge_alpha``: Streaming DiLoCo,
    arXiv:2501.18512; ``overlap``: CoCoD-SGD, Shen et al., IJCAI 2019; ``sync_steps_first``: post-local SGD, Lin et al.,
    arXiv:1808.07217.
    """

    sync_every: int = 16
    """Steps between two averages of the parameters (H)."""
    sync_schedule: Literal["constant", "adacomm"] = "constant"
    """adacomm: --sync-every shrinks with the square root of the loss."""
    average_slots: Literal["average", "keep"] = "keep"
    """The optimizer's slot variables (momentum and the like): averaged, or kept by each rank."""
    outer: Literal["average", "nesterov"] = "average"
    """Outer optimizer: take the average as it is, or as the gradient of SGD with Nesterov momentum."""
    outer_learning_rate: float = 0.7
    """Learning rate of --outer nesterov."""
    outer_momentum: float = 0.9
    """Momentum of --outer nesterov."""
    overlap: bool = False
    """Average in the background while ranks continue to train."""
    fragments: int = 1
    """Groups of layers (F) that are averaged one at a time, each once in --sync-every steps; 1: all layers at once."""
    fragment_delay: int | None = None
    """With --overlap, merge an average this many steps after it was sent (default: as soon as it is complete)."""
    merge_alpha: float = 1.0
    """Weight of the average when it is merged with a rank's own parameters; 1: replace them by it."""
    wait_free: bool = False
    """Do not wait for stragglers: faster ranks make more steps until the slowest has made its own, or --round-quorum
    have."""
    round_quorum: int | None = None
    """With --wait-free, end a round when this many ranks have made their steps; the others contribute those that they
    have made (default: all)."""
    round_grace: float = 0.25
    """Once --round-quorum ranks have made their steps, give the others this fraction of the round's time so far."""
    sync_dtype: Literal["float32", "int8", "int4"] = "float32"
    """Data type in which displacements of weights are sent; integers with scales and error feedback."""
    sync_steps_first: int = 0
    """Steps in sync mode before local SGD begins (post-local SGD)."""
    average_across: Literal["rank", "host"] = "rank"
    """host: the ranks of a host average their gradients at every step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "sync_every", lambda value: value >= 1, "at least 1")
        require(self, "sync_steps_first", lambda value: value >= 0, "at least 0")
        cycle = f"at least 1 and at most {option('sync_every')} ({self.sync_every})"
        for name in ("fragments", "fragment_delay"):
            require(self, name, lambda value: 1 <= value <= self.sync_every, cycle)
        require(self, "round_quorum", lambda value: value >= 1, "at least 1")
        require(self, "round_grace", lambda value: 0 <= value <= 10, "from 0 to 10")
        require(self, "merge_alpha", lambda value: 0 < value <= 1, "above 0 and at most 1")
        require(self, "outer_learning_rate", lambda value: 0 < value <= 2, "above 0 and at most 2")
        require(
            self,
            "outer_momentum",
            lambda value: 0 <= value < 1,
            "at least 0 and below 1, or displacements add up without limit",
        )

    @property
    def in_background(self) -> bool:
        """Whether ranks continue to train while parameters are averaged."""
        return self.overlap or self.wait_free
