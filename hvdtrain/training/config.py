"""Options of training: the step, and the run around it."""

import dataclasses
import math
from typing import Literal

from cyclopts import Parameter

from hvdtrain.checkpoint.config import CheckpointConfig
from hvdtrain.config.fields import Config, help_group, require
from hvdtrain.local_sgd.config import LocalSGDConfig
from hvdtrain.loggers.config import LoggingConfig


@Parameter(name="*", group=help_group("Guards"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class GuardConfig(Config):
    """Checks for values that are not finite, unreadable samples and diverged replicas."""

    on_nan: Literal["stop", "skip", "ignore"] = "stop"
    """After a loss or gradient that is not finite: end the job, skip the step on every rank, or continue."""
    on_unequal: Literal["stop", "warn", "ignore"] = "stop"
    """If a step on several ranks is not that of one process: end the job, report it, or do not check."""
    bad_samples: int = 0
    """Number of unreadable samples to tolerate, over all ranks; they are reported and left out."""
    check_every: int = 500
    """Steps between comparisons of all variables over ranks; 0: only at the end."""
    guard_every: int = 10
    """Steps between checks of skipped steps, the loss scale and the number of unreadable samples."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("bad_samples", "check_every"):
            require(self, name, lambda value: value >= 0, "at least 0")
        require(self, "guard_every", lambda value: value >= 1, "at least 1")


@Parameter(name="*", group=help_group("Stragglers (--mode sync)"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class BalanceConfig(Config):
    """How the samples of a global batch are assigned to ranks of different speed."""

    balance: bool = False
    """Give faster ranks more samples of the same global batch; the updates stay those of one process."""
    balance_every: int = 50
    """Steps between two decisions of --balance."""
    max_batch_size: int | None = None
    """The most samples per rank and micro-batch that --balance may assign (default: twice --batch-size)."""
    shares: str | None = None
    """Fixed shares of the global batch instead of --balance, a number for each rank: 2,2,2,1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # Step times are kept for 1,024 steps.
        require(self, "balance_every", lambda value: 1 <= value <= 512, "from 1 to 512")
        require(self, "max_batch_size", lambda value: value >= 1, "at least 1")
        require(self, "shares", _are_shares, "whole numbers from 0 to 1000000, not all of them 0, separated by commas")

    @property
    def is_active(self) -> bool:
        """Whether ranks may have different batch sizes."""
        return self.balance or self.shares is not None

    @property
    def rank_shares(self) -> tuple[int, ...] | None:
        """The fixed shares, by rank; None if there are none."""
        return None if self.shares is None else tuple(int(each) for each in self.shares.split(","))


@Parameter(name="*", group=help_group("Stragglers (--mode sync)"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class QuorumConfig(Config):
    """Backup workers: how many ranks a synchronous step waits for."""

    quorum: int | None = None
    """Close a step when this many ranks have made their micro-batches (default: all). Late ones are trained on in a
    later step."""
    step_deadline: float | None = None
    """Seconds after which a step closes with fewer ranks than --quorum, but at least one (default: never)."""
    step_grace: float = 0.25
    """Once a quorum is ready, wait for ranks that still compute for this fraction of the step so far."""
    max_missed_updates: int = 16
    """Wait for a rank that has missed this many updates in a row. It keeps these in memory, each as large as the
    gradients."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "quorum", lambda value: value >= 1, "at least 1")
        require(self, "step_deadline", lambda value: math.isfinite(value) and value > 0, "a finite number above 0")
        require(self, "step_grace", lambda value: 0 <= value <= 10, "from 0 to 10")
        require(self, "max_missed_updates", lambda value: value >= 1, "at least 1")

    @property
    def is_active(self) -> bool:
        """Whether steps close before all ranks are ready."""
        return self.quorum is not None


@Parameter(name="*", group=help_group("Replay (--quorum or --wait-free)"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordConfig(Config):
    """How a run whose result depends on the ranks' timing is repeated."""

    record: str | None = None
    """File in which rank 0 records who contributed to each update, or what each rank did in each round."""
    replay: str | None = None
    """Repeat the run that --record wrote to this file: its timing decides instead of that of these ranks."""


def _are_shares(text: str) -> bool:
    parts = [each.strip() for each in text.split(",")]
    are_numbers = all(each.isascii() and each.isdigit() and len(each) <= 7 for each in parts)
    return are_numbers and all(int(each) <= 1_000_000 for each in parts) and any(int(each) for each in parts)


@Parameter(name="*", group=help_group("Training"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class StepConfig(Config):
    """Options of a training step."""

    batch_size: int = 32
    """Samples per rank and micro-batch, unless the task has its own."""
    global_batch_size: int | None = None
    """Samples per micro-batch of all ranks together, divided among them whatever their number; replaces --batch-size in
    training. It need not be a multiple of their number."""
    rescale: bool = False
    """Let the global batch grow and shrink with the number of ranks of an elastic or resumed run, instead of keeping
    it."""
    mode: Literal["sync", "local"] = "sync"
    """sync: average gradients at every step; local: local SGD, average parameters periodically."""
    gradient_accumulation_steps: int = 1
    """Micro-batches per step, with one allreduce for all of them."""
    steps_per_execution: int = 1
    """Steps in one compiled call; more is faster for small models."""
    jit_compile: bool | None = None
    """Let XLA compile the forward and backward pass (default: on a GPU, if Keras does and nothing excludes it)."""
    prefetch_to_device: bool = False
    """Copy batches to this rank's GPU ahead of the steps that use them."""
    sync_batchnorm: bool = False
    """Batch normalization over the samples of all ranks."""
    remainder: Literal["pad", "drop"] = "pad"
    """Samples that do not fill the last step of an epoch: distribute them with exact weights, or drop them."""
    seed: int = 0
    """Seed of the initial weights, the order of samples, augmentation and dropout."""
    local_sgd: LocalSGDConfig = dataclasses.field(default_factory=LocalSGDConfig)
    """Options of ``mode="local"``."""
    balancing: BalanceConfig = dataclasses.field(default_factory=BalanceConfig)
    """How samples are assigned to ranks of different speed."""
    stragglers: QuorumConfig = dataclasses.field(default_factory=QuorumConfig)
    """How many ranks a step waits for."""
    recording: RecordConfig = dataclasses.field(default_factory=RecordConfig)
    """How a run without waiting for all ranks is repeated."""
    guards: GuardConfig = dataclasses.field(default_factory=GuardConfig)
    """Options of checks during the run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("batch_size", "global_batch_size", "gradient_accumulation_steps", "steps_per_execution"):
            require(self, name, lambda value: value >= 1, "at least 1")
        require(self, "seed", lambda value: 0 <= value < 1 << 32, "from 0 to 4294967295")


def sync_config(config: StepConfig) -> StepConfig:
    """The same steps in sync mode, made by all ranks together: without options of local SGD and --quorum."""
    left_out = ("mode", "local_sgd", "stragglers", "recording")
    names = [field.name for field in dataclasses.fields(StepConfig) if field.name not in left_out]
    return StepConfig(**{name: getattr(config, name) for name in names})


@Parameter(name="*", group=help_group("Training"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(StepConfig):
    """Options of a :class:`~hvdtrain.Trainer`."""

    steps: int | None = None
    """Number of steps to train; excludes --epochs (default: the task's)."""
    epochs: int | None = None
    """Number of epochs to train; excludes --steps."""
    eval_every: int = 0
    """Steps between evaluations; 0: at the end of each epoch."""
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    """When checkpoints are saved, if there is a checkpointer."""
    logging: LoggingConfig = dataclasses.field(default_factory=LoggingConfig)
    """What is logged, and how often."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("steps", "epochs"):
            require(self, name, lambda value: value >= 1, "at least 1")
        require(self, "eval_every", lambda value: value >= 0, "at least 0")
