"""Options of logging."""

import dataclasses

from cyclopts import Parameter

from hvdtrain.config.fields import Config, help_group, require
from hvdtrain.loggers.names import logger_names


@Parameter(name="*", group=help_group("Logging"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class LoggingConfig(Config):
    """What a run reports, and how often."""

    log_every: int = 10
    """Steps between log lines. Unless it is set, about one line a second is printed; metrics.jsonl holds all."""
    histograms_every: int = 0
    """Steps between histograms of weights, gradients and activations in TensorBoard; 0: none."""
    profile_steps: str | None = None
    """First and last step to profile with TensorFlow's profiler, as A:B."""
    loggers: str | None = None
    """Further loggers, separated by commas: csv (train.csv and eval.csv), mlflow, wandb."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "log_every", lambda value: value >= 1, "at least 1")
        require(self, "histograms_every", lambda value: value >= 0, "at least 0")
        logger_names(self.loggers)
        require(self, "profile_steps", _is_step_range, "two steps, first:last, the first at least 1")

    @property
    def profile_range(self) -> tuple[int, int] | None:
        """The first and last step to profile, counted from 1; None for none."""
        if self.profile_steps is None:
            return None
        first, _, last = self.profile_steps.partition(":")
        return int(first), int(last)


def _is_step_range(text: str) -> bool:
    first, _, last = text.partition(":")
    are_numbers = all(each.isascii() and each.isdigit() and len(each) <= 18 for each in (first, last))
    return are_numbers and 1 <= int(first) <= int(last)
