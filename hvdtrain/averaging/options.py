"""How replicas that train alone meet: what a user chooses, and its rules."""

import dataclasses

from hvdtrain.errors import UsageError

SLOTS = ("average", "keep")
OUTERS = ("average", "nesterov")
SCHEDULES = ("constant", "adacomm")
PLACES = ("rank", "host")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """The async mode: each rank makes steps of its own, and parameters are averaged now and then.

    Args:
        every: steps between two averages (H).
        schedule: ``constant``, or ``adacomm``: ``every`` shrinks with the root of the loss (Wang and Joshi,
            arXiv:1810.08313).
        slots: what becomes of the optimizer's own variables (momentum and the like): ``keep`` leaves each rank its
            own, ``average`` averages them too.
        outer: what is done with the averaged displacement: ``average`` takes it as it is (local SGD, Stich,
            arXiv:1805.09767), ``nesterov`` for the gradient of an outer SGD (DiLoCo, arXiv:2311.08105; SlowMo,
            arXiv:1910.00643).
        outer_rate, outer_momentum: of ``nesterov``.
        overlap: average in the background, and go on meanwhile (CoCoD-SGD, Shen et al., IJCAI 2019).
        wait_free: a round ends when the slowest rank has made ``every`` steps; the others go on until then, and
            while they are averaged, as with ``overlap``.
        after: steps that are made in sync mode first (post-local SGD, Lin et al., arXiv:1808.07217).
        across: ``rank``, or ``host``: ranks of one host average their gradients at each step.

    Raises:
        UsageError: a value breaks its rule.
    """

    every: int = 16
    schedule: str = "constant"
    slots: str = "keep"
    outer: str = "average"
    outer_rate: float = 0.7
    outer_momentum: float = 0.9
    overlap: bool = False
    wait_free: bool = False
    after: int = 0
    across: str = "rank"

    def __post_init__(self) -> None:
        for name, choices in (("schedule", SCHEDULES), ("slots", SLOTS), ("outer", OUTERS), ("across", PLACES)):
            if getattr(self, name) not in choices:
                raise UsageError(f"{name} must be one of {', '.join(choices)}. Received: {getattr(self, name)!r}")
        if self.every < 1:
            raise UsageError(
                f"steps between two averages must be at least 1. Received: {self.every}. To average at every step, "
                "train in sync mode."
            )
        if self.after < 0:
            raise UsageError(f"the step at which local training begins must be 0 or later. Received: {self.after}")
        if not 0 < self.outer_rate <= 2:
            raise UsageError(f"the outer rate must be above 0 and at most 2. Received: {self.outer_rate}")
        if not 0 <= self.outer_momentum < 1:
            raise UsageError(
                f"the outer momentum must be at least 0 and below 1, or displacements add up without end. Received: "
                f"{self.outer_momentum}"
            )
        if self.in_background and self.slots == "average":
            raise UsageError(
                "overlap and wait_free keep optimizer variables: what is positive, as Adam's second moments are, would "
                "not stay so where a late average is added to it. Received: slots='average'. Use slots='keep' "
                "(--average-slots keep)."
            )
        if self.wait_free and self.across == "host":
            raise UsageError(
                "wait_free needs ranks that make steps by themselves; with across='host' those of a host wait for each "
                "other at every step. Leave one of the two out."
            )
        if self.wait_free and self.schedule != "constant":
            raise UsageError(
                "wait_free needs schedule='constant'. Received: schedule='adacomm'. Leave one of them out."
            )

    @property
    def in_background(self) -> bool:
        """Whether ranks go on while they are averaged."""
        return self.overlap or self.wait_free
