"""Options of ``python -m hvdtrain bench``."""

import dataclasses
import math
from typing import Annotated, Literal

from cyclopts import Parameter

from hvdtrain.commands.config import TaskConfig
from hvdtrain.config import exclusions
from hvdtrain.config.fields import NOT_AN_OPTION, Config, broken_rule, facts_of, help_group, require
from hvdtrain.distributed.config import parse_compression
from hvdtrain.training.config import StepConfig


@Parameter(name="*", group=help_group("Training"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchStepConfig(StepConfig):
    """The steps that are measured: always both in sync mode and in local SGD."""

    mode: Annotated[Literal["local"], Parameter(parse=False)] = dataclasses.field(
        default="local", metadata=NOT_AN_OPTION
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        exclusions.require_compatible({**facts_of(self), **exclusions.facts_from(exclusions.BENCH)})


@Parameter(name="*", group=help_group("Prediction (--predict)"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictionConfig(Config):
    """The predictions: numbers of ranks, the network, failures."""

    predict: str | None = None
    """Numbers of ranks to predict step times for, such as 8,64,512."""
    ranks_per_host: int | None = None
    """Ranks on each host (default: as in this job)."""
    link_mbit: float | None = None
    """Rate of a host's link in an allreduce, Mbit/s (default: measured)."""
    link_latency_ms: float | None = None
    """Latency of a message between hosts, software included (default: measured)."""
    within_mbit: float | None = None
    """Rate of an allreduce within a host, Mbit/s (default: measured if all ranks of this job share a host)."""
    within_latency_ms: float | None = None
    """Latency of a message within a host, software included (default: likewise)."""
    rank_mtbf_hours: float | None = None
    """Mean time between failures of one rank (default: no failures)."""
    checkpoint_minutes: float = 10.0
    """Training time between checkpoints."""
    checkpoint_seconds: float = 1.0
    """Time for which a checkpoint stops training."""
    restart_seconds: float = 60.0
    """Time from a failure to the next step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in (
            *("link_mbit", "within_mbit", "rank_mtbf_hours", "checkpoint_minutes"),
            *("link_latency_ms", "within_latency_ms", "checkpoint_seconds", "restart_seconds"),
        ):
            require(self, name, lambda value: math.isfinite(value) and value > 0, "a finite number above 0")
        require(self, "ranks_per_host", lambda value: value >= 1, "at least 1")
        if self.predict is not None and not all(each.isdigit() and int(each) > 0 for each in self.predict.split(",")):
            raise broken_rule("predict", "numbers of ranks separated by commas, such as 8,64,512", self.predict)

    @property
    def predicted_ranks(self) -> list[int]:
        """The numbers of ranks in ``--predict``."""
        return [] if self.predict is None else [int(each) for each in self.predict.split(",")]


@Parameter(name="*", group=help_group("Measurement"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasurementConfig(Config):
    """How steps are measured."""

    output: str = "bench"
    """Folder for bench.json and bench.png."""
    blocks: int = 10
    """Measurements of each case, interleaved with those of the others."""
    block_seconds: float = 1.0
    """Minimum duration of a measurement."""
    compressions: str | None = None
    """Also measure sync mode with these values of --compression, such as fp16,powersgd:4, and recommend one."""
    max_spread: float = 0.1
    """Mark a case as unsteady if the medians of its odd and even measurements differ by more than this fraction."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "blocks", lambda value: value >= 4, "at least 4")
        for name in self.measured_compressions:
            if parse_compression(name)[0] == "none":
                raise broken_rule("compressions", "compressions separated by commas, such as fp16,powersgd:4", name)
        for name in ("block_seconds", "max_spread"):
            require(self, name, lambda value: math.isfinite(value) and value > 0, "a finite number above 0")

    @property
    def measured_compressions(self) -> list[str]:
        """The names in ``--compressions``."""
        return [] if self.compressions is None else self.compressions.split(",")


@Parameter(name="*", group=help_group("Task"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchConfig(TaskConfig):
    """All options of ``python -m hvdtrain bench``: those of training that affect the time of a step, and its own."""

    training: BenchStepConfig = dataclasses.field(default_factory=BenchStepConfig)
    measurement: MeasurementConfig = dataclasses.field(default_factory=MeasurementConfig)
    prediction: PredictionConfig = dataclasses.field(default_factory=PredictionConfig)
