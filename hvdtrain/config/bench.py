"""What ``python -m hvdtrain bench`` can be told."""

import dataclasses
import math
from typing import ClassVar

from hvdtrain.config.options import MEASURING, PREDICTING, broken, flag_of, option, require
from hvdtrain.config.train import TrainConfig
from hvdtrain.errors import UsageError


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchConfig(TrainConfig):
    """Everything ``python -m hvdtrain bench`` can be told: what of training decides how long a step takes."""

    output: str = option(MEASURING, "bench", "folder for bench.json and bench.png", metavar="DIR")
    blocks: int = option(MEASURING, 10, "measurements of each case, in turn with the others")
    block_seconds: float = option(MEASURING, 1.0, "how long a measurement is to take, at least", metavar="SECONDS")
    max_spread: float = option(
        MEASURING,
        0.1,
        "report nothing where every other measurement of a case differs from those between by more than this share",
        metavar="X",
    )
    predict: str | None = option(
        PREDICTING, None, "numbers of ranks whose steps to predict, such as 8,64,512", metavar="N,…"
    )
    ranks_per_host: int | None = option(PREDICTING, None, "ranks on each host (default: as in this job)")
    link_mbit: float | None = option(
        PREDICTING, None, "rate that the link of a host gives to an allreduce (default: measured)", metavar="X"
    )
    link_latency_ms: float | None = option(
        PREDICTING, None, "of a message between hosts, software included (default: measured)", metavar="X"
    )
    within_mbit: float | None = option(
        PREDICTING,
        None,
        "the same within a host (default: measured, where all ranks of this job share one)",
        metavar="X",
    )
    within_latency_ms: float | None = option(PREDICTING, None, "of a message within a host", metavar="X")
    rank_mtbf_hours: float | None = option(
        PREDICTING, None, "mean time between failures of one rank (default: no failures)", metavar="X"
    )
    checkpoint_minutes: float = option(PREDICTING, 10.0, "training time between checkpoints", metavar="X")
    checkpoint_seconds: float = option(PREDICTING, 1.0, "what a checkpoint keeps ranks from training", metavar="X")
    restart_seconds: float = option(PREDICTING, 60.0, "from a failure to the next step", metavar="X")
    mode: str = "local"
    """Both modes are measured."""

    NOT_OFFERED: ClassVar[frozenset[str]] = frozenset(
        {
            *("run_dir", "steps", "epochs", "mode", "op", "sync_batchnorm", "accumulate", "check_every", "wait_free"),
            *("average_schedule", "local_after", "average_across", "eval_every", "checkpoint_every", "keep", "resume"),
            *(
                "log_every",
                "histograms_every",
                "on_nan",
                "timeline",
                "profile_steps",
                "deterministic",
                "ema_ramp",
                "autotune",
            ),
        }
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "blocks", lambda value: value >= 4, "at least 4")
        for name in (
            *("block_seconds", "max_spread", "link_mbit", "within_mbit", "rank_mtbf_hours", "checkpoint_minutes"),
            *("link_latency_ms", "within_latency_ms", "checkpoint_seconds", "restart_seconds"),
        ):
            require(self, name, lambda value: math.isfinite(value) and value > 0, "a finite number above 0")
        require(self, "ranks_per_host", lambda value: value >= 1, "at least 1")
        for one, other in (("link_mbit", "link_latency_ms"), ("within_mbit", "within_latency_ms")):
            if (getattr(self, one) is None) != (getattr(self, other) is None):
                raise UsageError(f"{flag_of(one)} and {flag_of(other)} belong together. Received: one of them.")
        if self.predict is not None and not all(each.isdigit() and int(each) > 0 for each in self.predict.split(",")):
            raise broken("predict", "numbers of ranks with commas between them, such as 8,64,512", self.predict)

    @property
    def predicted_ranks(self) -> list[int]:
        """Those of ``--predict``."""
        return [] if self.predict is None else [int(each) for each in self.predict.split(",")]
