"""What the commands can be told that read a run."""

import dataclasses

from hvdtrain.config.options import RUNNING, WHAT, Config, broken, option, require
from hvdtrain.errors import UsageError


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ReadingConfig(Config):
    """What all commands can be told that read a run."""

    task: str = option(WHAT, "digits", "the run's, to find its folder by", metavar="NAME")
    run_dir: str | None = option(WHAT, None, "the run's folder (default: runs/<task>)", metavar="DIR")
    checkpoint: str | None = option(WHAT, None, "path of a checkpoint (default: the run's latest)", metavar="PATH")
    data_dir: str | None = option(
        WHAT, None, "folder with the task's data files (default: the run's own)", metavar="DIR"
    )
    threads: int | None = option(RUNNING, None, "compute threads per rank (default: a fair share of the host's cores)")
    stall_timeout: float = option(
        RUNNING, 600.0, "end the job where a rank is silent for so long; 0: never", metavar="SECONDS"
    )

    def __post_init__(self) -> None:
        require(self, "threads", lambda value: value >= 1, "at least 1")
        require(self, "stall_timeout", lambda value: value >= 0, "at least 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig(_ReadingConfig):
    """Everything ``python -m hvdtrain eval`` can be told."""

    batch_size: int | None = option(RUNNING, None, "samples per rank and batch (default: the run's)")
    watch: bool = option(
        RUNNING, False, "evaluate each checkpoint as it appears, until the run has ended and its last is done"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "batch_size", lambda value: value >= 1, "at least 1")
        if self.watch and self.checkpoint is not None:
            raise UsageError(
                f"--watch takes the latest checkpoint each time. Received: --checkpoint {self.checkpoint}. "
                "Leave one of them out."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportConfig(_ReadingConfig):
    """Everything ``python -m hvdtrain export`` can be told."""

    format: str = option(WHAT, "keras", "what to write", choices=("keras", "saved_model", "onnx"))
    output: str | None = option(
        WHAT,
        None,
        "where to write it, a place that is not there yet (default: export… in the run's folder)",
        metavar="PATH",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format not in ("keras", "saved_model", "onnx"):
            raise broken("format", "one of keras, saved_model, onnx", self.format)
