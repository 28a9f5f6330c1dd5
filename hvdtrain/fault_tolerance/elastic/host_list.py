"""The hosts on which ``hvdtrain elastic`` starts processes, which may change while the job runs."""

import sys
from collections.abc import Callable
from pathlib import Path

from hvdtrain.config import exclusions
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.system.hosts import Host, find_problems, read_hosts, remote_names

_READ_S = 2.0
_START_TIMEOUT_S = 30.0


class HostList:
    """The hosts to start processes on: this one, given ones, or those in a file, which may change.

    Raises:
        UsageError: the list or the file is malformed, empty or cannot be read.
        HvdtrainError: a host is not ready.
    """

    def __init__(self, hosts: str | None, hostfile: Path | None, here: int):
        if hosts is not None and hostfile is not None:
            exclusions.require_compatible(exclusions.facts_from(exclusions.HOSTS, exclusions.HOSTFILE), known=())
        self._file = hostfile
        self._text = hosts or ""
        self._read_at = 0.0
        try:
            if hostfile is not None:
                self._text = hostfile.read_text()
            self.hosts = read_hosts(self._text)
        except (OSError, ValueError) as error:
            raise UsageError(str(error)) from None
        if not self.hosts:
            if hosts is not None or hostfile is not None:
                raise UsageError(f"there must be at least one host. Received: none in {hostfile or '--hosts'}")
            self.hosts = [Host("localhost", here)] if here else []
        if problems := find_problems(self.remote, Path(sys.executable), _START_TIMEOUT_S):
            raise HvdtrainError("\n".join(problems))

    @property
    def remote(self) -> list[str]:
        """The names of the other hosts."""
        return remote_names(self.hosts)

    @property
    def num_slots(self) -> int:
        return sum(host.slots for host in self.hosts)

    def has_changed(self, now: float, say: Callable[[str], None]) -> bool:
        """Reads the file again if it is due; returns whether the hosts have changed."""
        if self._file is None or now < self._read_at:
            return False
        self._read_at = now + _READ_S
        try:
            text = self._file.read_text()
            if text == self._text:
                return False
            self._text = text
            hosts = read_hosts(text)
            if not hosts:  # As for a moment, while it is written.
                raise ValueError("it names no host")
        except (OSError, ValueError) as error:
            say(f"{self._file} is ignored until it changes: {error}")
            return False
        before, self.hosts = self.hosts, hosts
        return hosts != before
