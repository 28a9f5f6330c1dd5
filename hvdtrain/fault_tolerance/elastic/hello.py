"""The first message of a process to the coordinator: who it is, and what must be equal in all processes."""

import dataclasses
import hmac
from collections.abc import Mapping
from typing import Any

_MAX_DIFFERENCES = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hello:
    """A process that asks to become a member."""

    host: str
    pid: int
    worker: int | None
    """The number of the worker, if the coordinator's process has started it."""
    facts: Mapping[str, Any]
    """What must be equal in all processes."""
    stall_timeout_s: float
    """How long it may be silent; 0: forever."""

    def message(self, token: str) -> dict[str, Any]:
        """The message for the channel; the token proves that the process belongs to the job."""
        return {"kind": "hello", "token": token, **dataclasses.asdict(self)}

    @classmethod
    def from_message(cls, message: Mapping[str, Any], token: str) -> "Hello | None":
        """None if a process outside the job has sent it."""
        try:
            valid = hmac.compare_digest(str(message["token"]).encode(errors="replace"), token.encode())
            if not valid or message["kind"] != "hello":
                return None
            return cls(
                host=str(message["host"]),
                pid=int(message["pid"]),
                worker=None if message["worker"] is None else int(message["worker"]),
                facts=dict(message["facts"]),
                stall_timeout_s=float(message["stall_timeout_s"]),
            )
        except (KeyError, TypeError, ValueError):
            return None


def differences(expected: Mapping[str, Any], received: Mapping[str, Any]) -> str:
    """The facts that are not equal, in words; empty if all are."""
    names = [name for name in sorted({*expected, *received}) if expected.get(name) != received.get(name)]
    shown = [f"{name}: {received.get(name, 'missing')!r}, not {expected.get(name, 'missing')!r}" for name in names]
    more = f"; and {len(shown) - _MAX_DIFFERENCES} more" if len(shown) > _MAX_DIFFERENCES else ""
    return "; ".join(shown[:_MAX_DIFFERENCES]) + more
