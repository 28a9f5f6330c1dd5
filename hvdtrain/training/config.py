"""Options of training: the step, and the run around it."""

import dataclasses
from typing import Literal

from cyclopts import Parameter

from hvdtrain.checkpoint.config import CheckpointConfig
from hvdtrain.config.fields import Config, default_of, flag_of, help_group, option_names, require
from hvdtrain.errors import UsageError
from hvdtrain.local_sgd.config import LocalSGDConfig
from hvdtrain.loggers.config import LoggingConfig


@Parameter(name="*", group=help_group("Guards"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class GuardConfig(Config):
    """What protects a run from bad numbers, bad samples and diverged replicas."""

    on_nan: Literal["stop", "skip", "ignore"] = "stop"
    """After a loss or gradient that is not finite: end the job, skip the step on every rank, or continue."""
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


@Parameter(name="*", group=help_group("Training"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class StepConfig(Config):
    """What decides how a training step is made."""

    batch_size: int = 32
    """Samples per rank and micro-batch, unless the task has its own."""
    mode: Literal["sync", "local"] = "sync"
    """sync: average gradients at every step; local: local SGD, average parameters periodically."""
    gradient_accumulation_steps: int = 1
    """Micro-batches per step, with one allreduce for all of them."""
    steps_per_execution: int = 1
    """Steps in one compiled call; more is faster for small models."""
    jit_compile: bool = False
    """Let XLA compile the forward and backward pass."""
    sync_batchnorm: bool = False
    """Batch normalization over the samples of all ranks."""
    remainder: Literal["pad", "drop"] = "pad"
    """Samples that fill no whole step at the end of an epoch: share them out with exact weights, or leave them out."""
    seed: int = 0
    """Seed of the initial weights, the order of samples, augmentation and dropout."""
    local_sgd: LocalSGDConfig = dataclasses.field(default_factory=LocalSGDConfig)
    guards: GuardConfig = dataclasses.field(default_factory=GuardConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("batch_size", "gradient_accumulation_steps", "steps_per_execution"):
            require(self, name, lambda value: value >= 1, "at least 1")
        require(self, "seed", lambda value: 0 <= value < 1 << 32, "from 0 to 4294967295")
        if self.mode == "local":
            self._require_independent_ranks()
        else:
            for name in option_names(LocalSGDConfig):
                value = getattr(self.local_sgd, name)
                if value != default_of(LocalSGDConfig, name):
                    raise UsageError(
                        f"{flag_of(name)} needs --mode local. Received: {value!r} in sync mode. Add --mode local, or "
                        "leave it out."
                    )
        if self.jit_compile and self.sync_batchnorm:
            raise UsageError(
                "--jit-compile excludes --sync-batchnorm, which communicates in the forward pass. Received: both. "
                "Leave one of them out."
            )

    def _require_independent_ranks(self) -> None:
        if self.gradient_accumulation_steps > 1:
            raise UsageError(
                "--gradient-accumulation-steps saves reductions, of which local SGD has few. Received: "
                f"{self.gradient_accumulation_steps} in --mode local. Use larger batches, or a larger --sync-every."
            )
        if self.sync_batchnorm:
            raise UsageError(
                "--sync-batchnorm needs ranks in lockstep, which local SGD has not. Received: both. Leave "
                "--sync-batchnorm out."
            )


def sync_config(config: StepConfig) -> StepConfig:
    """The same steps in sync mode, without options of local SGD."""
    names = [field.name for field in dataclasses.fields(StepConfig) if field.name not in ("mode", "local_sgd")]
    return StepConfig(**{name: getattr(config, name) for name in names})


@Parameter(name="*", group=help_group("Training"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(StepConfig):
    """What a :class:`~hvdtrain.Trainer` does with a compiled model."""

    steps: int | None = None
    """Number of steps to train; excludes --epochs (default: the task's)."""
    epochs: int | None = None
    """Number of epochs to train; excludes --steps."""
    eval_every: int = 0
    """Steps between evaluations; 0: at the end of each epoch."""
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    logging: LoggingConfig = dataclasses.field(default_factory=LoggingConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("steps", "epochs"):
            require(self, name, lambda value: value >= 1, "at least 1")
        require(self, "eval_every", lambda value: value >= 0, "at least 0")
        if self.steps is not None and self.epochs is not None:
            raise UsageError(
                f"--steps and --epochs exclude each other. Received: {self.steps} and {self.epochs}. Set one of them."
            )
