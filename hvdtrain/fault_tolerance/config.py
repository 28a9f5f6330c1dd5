"""Options of the job watch."""

import dataclasses

from cyclopts import Parameter

from hvdtrain.config.fields import Config, help_group, require

# A year; clocks and timeouts of the operating system overflow somewhere above it.
_MAX_TIMEOUT_S = 366 * 86400.0


@Parameter(name="*", group=help_group("Fault tolerance"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class JobWatchConfig(Config):
    """How the ranks watch each other."""

    stall_timeout: float = 600.0
    """End the job if a rank is silent, or no rank makes progress, for this many seconds; 0: never."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "stall_timeout", lambda value: 0 <= value <= _MAX_TIMEOUT_S, f"from 0 to {_MAX_TIMEOUT_S:.0f}")
