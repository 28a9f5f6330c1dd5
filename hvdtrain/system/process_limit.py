"""How many more processes and threads the system lets this user start (``ulimit -u``)."""

import os
import resource
from pathlib import Path

_NEEDED = 32
"""A rank with one thread for computation started 20 in all; a few more for its launcher."""
_LARGE = 8192
"""Limits from here on are not reached by a job's ranks; counting all processes of a large host takes a while."""


def shortage() -> str | None:
    """Says that this user may start fewer processes and threads than a rank needs; None if not.

    Libraries that cannot start one end the process, without a word about the limit.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft == resource.RLIM_INFINITY or soft >= _LARGE or os.geteuid() == 0:
        return None
    room = soft - _num_running(os.getuid())
    if room >= _NEEDED:
        return None
    return (
        f"this user may start {max(0, room)} more processes and threads on this host (ulimit -u is {soft}). "
        f"A rank needs about {_NEEDED}: if it ends without a reason, raise the limit."
    )


def _num_running(user: int) -> int:
    """The number of a user's processes and threads on this host."""
    found = 0
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":", 1) for line in status.read_text(errors="replace").splitlines() if ":" in line)
        except OSError:
            continue  # It has ended meanwhile.
        if int(fields["Uid"].split()[0]) == user:
            found += int(fields.get("Threads", 1))
    return found
