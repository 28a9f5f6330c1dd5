"""Options of the commands that train, evaluate and export."""

import dataclasses
from typing import Annotated, Literal

from cyclopts import Parameter

from hvdtrain.config.fields import NOT_AN_OPTION, Config, help_group, require
from hvdtrain.distributed.config import ReductionConfig, RuntimeConfig
from hvdtrain.errors import UsageError
from hvdtrain.fault_tolerance.config import JobWatchConfig
from hvdtrain.optim.config import LearningRateConfig, OptimizerConfig
from hvdtrain.training.config import StepConfig, TrainConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommandConfig(Config):
    """What all commands that run on all ranks have in common."""

    runtime: RuntimeConfig = dataclasses.field(default_factory=RuntimeConfig)
    job_watch: JobWatchConfig = dataclasses.field(default_factory=JobWatchConfig)


@Parameter(name="*", group=help_group("Task"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskConfig(CommandConfig):
    """A task, and how its model is compiled and trained on each rank."""

    task: str = "digits"
    """A built-in task (digits, cifar10, mnist, mnist-softmax, tabular, text, synthetic-resnet50,
    synthetic-transformer), package.module:attribute, or the path of a .py file with a TASK."""
    data_dir: str | None = None
    """Folder with the task's data files, or its URL (s3://bucket/data): downloaded once per host."""
    mixed_precision: Literal["none", "float16", "bfloat16"] = "none"
    """Compute in half precision; float16 with loss scaling."""
    training: StepConfig = dataclasses.field(default_factory=StepConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    learning_rate: LearningRateConfig = dataclasses.field(default_factory=LearningRateConfig)
    reduction: ReductionConfig = dataclasses.field(default_factory=ReductionConfig)
    explicitly_set: Annotated[frozenset[str], Parameter(parse=False)] = dataclasses.field(
        default=frozenset(), repr=False, compare=False, metadata=NOT_AN_OPTION
    )
    """Options that were set explicitly, by a flag or in a file; the task's defaults do not replace them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.training.jit_compile and self.runtime.deterministic:
            raise UsageError(
                "--jit-compile excludes --deterministic: XLA has no deterministic form of some operations. Received: "
                "both. Leave one of them out."
            )
        if self.training.global_batch_size is not None and self.learning_rate.lr_scaling != "none":
            raise UsageError(
                "--global-batch-size keeps the batch of all ranks, and so its learning rate. Received: --lr-scaling "
                f"{self.learning_rate.lr_scaling}. Leave one of them out."
            )
        if self.training.rescale and self.learning_rate.lr_decay != "none":
            raise UsageError(
                "--rescale changes the number of steps, for which --lr-decay is laid out. Received: --lr-decay "
                f"{self.learning_rate.lr_decay}. Leave --rescale out, or set --lr-decay none."
            )
        if self.training.rescale and self.learning_rate.warmup_steps and self.learning_rate.lr_scaling != "none":
            raise UsageError(
                "--rescale with --lr-scaling changes the learning rate, which --warmup-steps fixes for the run. "
                f"Received: --warmup-steps {self.learning_rate.warmup_steps}. Leave one of them out."
            )
        if self.training.balancing.balance and self.runtime.deterministic:
            raise UsageError(
                "--deterministic excludes --balance, which measures time. Received: both. Use --shares, or leave one "
                "of them out."
            )
        if self.training.balancing.is_active and self.reduction.op == "adasum":
            raise UsageError(
                "--op adasum needs equal batches on all ranks. Received: --balance or --shares. Leave one of them out."
            )
        if self.training.stragglers.is_active and (self.reduction.op, self.reduction.compression) != (
            "average",
            "none",
        ):
            raise UsageError(
                "--quorum adds up the gradients of those ranks that are ready, as they are. Received: --op "
                f"{self.reduction.op}, --compression {self.reduction.compression}. Leave both out."
            )
        if self.reduction.shard_optimizer:
            excluded = {
                "local SGD, which bench also measures: each rank makes updates of its own": self.training.mode
                == "local",
                "--quorum, with which a late rank makes the updates that it missed": self.training.stragglers.is_active,
            }
            for reason, is_set in excluded.items():
                if is_set:
                    raise UsageError(f"--shard-optimizer excludes {reason}. Received: both. Leave one of them out.")
        if self.training.mode == "local" and self.reduction.op != "average":
            raise UsageError(f"--mode local needs --op average. Received: --op {self.reduction.op}. Leave --op out.")


@Parameter(name="*", group=help_group("Task"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig(TaskConfig):
    """All options of ``python -m hvdtrain train``."""

    run_dir: str | None = None
    """Folder for everything that the run writes, or its URL (s3://bucket/run) (default: runs/<task>)."""
    autotune: bool = False
    """Try --steps-per-execution and --groups on a copy of the model for some seconds, and use the fastest."""
    training: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    make_sample_data: str | None = dataclasses.field(default=None, metadata=NOT_AN_OPTION)
    """Write small files of the task's format into this folder, which is new or empty, and exit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.autotune and self.training.stragglers.is_active:
            raise UsageError(
                "--autotune tries several steps in one call, which --quorum excludes. Received: both. Leave one out."
            )


@Parameter(name="*", group=help_group("Run"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedRunConfig(CommandConfig):
    """Options of all commands that read a run."""

    task: str = "digits"
    """The run's task, which determines its folder."""
    run_dir: str | None = None
    """The run's folder or URL (default: runs/<task>)."""
    checkpoint: str | None = None
    """Path or URL of a checkpoint (default: the run's latest)."""
    data_dir: str | None = None
    """Folder with the task's data files, or its URL (default: the run's own)."""


@Parameter(name="*", group=help_group("Run"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig(TrainedRunConfig):
    """All options of ``python -m hvdtrain eval``."""

    batch_size: int | None = None
    """Samples per rank and batch (default: the run's)."""
    watch: bool = False
    """Evaluate each checkpoint as it appears, until the run has ended and its last one is evaluated."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "batch_size", lambda value: value >= 1, "at least 1")
        if self.watch and self.checkpoint is not None:
            raise UsageError(
                f"--watch evaluates each new checkpoint. Received: --checkpoint {self.checkpoint}. "
                "Leave one of them out."
            )


@Parameter(name="*", group=help_group("Run"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportConfig(TrainedRunConfig):
    """All options of ``python -m hvdtrain export``."""

    format: Literal["keras", "saved_model", "onnx"] = "keras"
    """Format to write."""
    output: str | None = None
    """Path or URL to write it to; must not exist yet (default: export… in the run's folder)."""
