"""Options of the commands that train, evaluate and export."""

import dataclasses
import math
from typing import Annotated, Literal

from cyclopts import Parameter

from hvdtrain.config.fields import NOT_AN_OPTION, Config, help_group, require
from hvdtrain.distributed.config import ReductionConfig, RuntimeConfig
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


@Parameter(name="*", group=help_group("Task"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig(TaskConfig):
    """All options of ``python -m hvdtrain train``."""

    run_dir: str | None = None
    """Folder for everything that the run writes, or its URL (s3://bucket/run) (default: runs/<task>)."""
    autotune: bool = False
    """Try --steps-per-execution and --groups on copies of the model before the run, and use the fastest; the choice is
    remembered. Reports what --jit-compile would gain."""
    autotune_limit: float = 0.05
    """The most time that --autotune may take, as a share of the run."""
    training: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    make_sample_data: str | None = dataclasses.field(default=None, metadata=NOT_AN_OPTION)
    """Write small files of the task's format into this folder, which is new or empty, and exit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "autotune_limit", lambda value: math.isfinite(value) and value > 0, "a finite number above 0")


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


@Parameter(name="*", group=help_group("Run"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportConfig(TrainedRunConfig):
    """All options of ``python -m hvdtrain export``."""

    format: Literal["keras", "saved_model", "onnx"] = "keras"
    """Format to write."""
    output: str | None = None
    """Path or URL to write it to; must not exist yet (default: export… in the run's folder)."""


@Parameter(name="*", group=help_group("Run"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictConfig(TrainedRunConfig):
    """All options of ``python -m hvdtrain predict``."""

    output: str = ""
    """File or URL to write the predictions to: .npy, .csv or .parquet. Required."""
    split: Literal["evaluation", "training"] = "evaluation"
    """The task's samples to predict for, in their order."""
    batch_size: int | None = None
    """Samples per rank and batch (default: the run's)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "batch_size", lambda value: value >= 1, "at least 1")
