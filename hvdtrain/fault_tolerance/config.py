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
    join: str | None = None
    """Join the elastic job whose coordinator listens at HOST:PORT; HVDTRAIN_ELASTIC_TOKEN holds its token."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "join", _is_endpoint, "HOST:PORT")
        require(self, "stall_timeout", lambda value: 0 <= value <= _MAX_TIMEOUT_S, f"from 0 to {_MAX_TIMEOUT_S:.0f}")


def _is_endpoint(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16
