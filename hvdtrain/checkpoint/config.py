"""Options of checkpoints."""

import dataclasses

from cyclopts import Parameter

from hvdtrain.config.fields import Config, help_group, require

CHECKPOINTS = "checkpoints"
"""The name of the folder of checkpoints in that of a run."""


@Parameter(name="*", group=help_group("Checkpoints"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Config):
    """When checkpoints are saved, how many are kept, and what a run resumes from."""

    checkpoint_every: int = 500
    """Steps between checkpoints; 0: only at the end, or when the job is asked to stop."""
    keep: int = 3
    """Number of checkpoints to keep."""
    resume: str = "auto"
    """auto: resume from the latest checkpoint, if any; must: fail if there is none; never: fail if there is one; or
    the path or URL of a checkpoint or run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "checkpoint_every", lambda value: value >= 0, "at least 0")
        require(self, "keep", lambda value: value >= 1, "at least 1")
