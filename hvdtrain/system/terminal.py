"""Terminal output of this process: whether stdout is a terminal, and lines on stderr."""

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from hvdtrain.system import environment, network

# Hosts of eight GPUs, twice.
_MAX_NAMES = 16


def stdout_is_terminal() -> bool:
    """Whether a progress bar on this rank's stdout is drawn for a person.

    Open MPI gives each rank a pseudo-terminal even when the job's output goes to a file. What counts is
    the launcher's stdout: that of the nearest ancestor whose stdout differs from this process's.
    """
    if not sys.stdout.isatty() or environment.get("TERM") == "dumb":
        return False
    if environment.launcher().name == "none":
        return True
    try:
        own = _stdout_of(psutil.Process()).readlink()
        launcher = next(each for each in psutil.Process().parents() if _stdout_of(each).readlink() != own)
        return _is_terminal(_stdout_of(launcher)) and not _tags_lines(launcher)
    except (OSError, StopIteration, psutil.Error):
        # The launcher is not visible: it belongs to another user, or runs outside of this container.
        return False


def report(rank: int, text: str) -> None:
    """Writes a message from a rank to stderr; ranks other than 0 have no reporter."""
    write(f"hvdtrain: {rank_name(rank)}: {text}")


def rank_name(rank: int, host: str | None = None) -> str:
    """``rank 2 (host b)``; on this host unless another one is given."""
    return f"rank {rank} (host {host or network.host_name()})"


def some_of(names: Sequence[str], *, at_most: int = _MAX_NAMES) -> str:
    """Names in a message, separated by commas; the first few of thousands."""
    num_more = len(names) - at_most
    return ", ".join(names[:at_most]) + (f" and {num_more:,} more" if num_more > 0 else "")


def write(text: str) -> None:
    """Writes one or more lines to stderr; does nothing if stderr is closed or the disk is full."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        # One write: launchers tag and interleave the output of ranks line by line.
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def discard_unwritable_output() -> None:
    """Drops what stdout cannot take, at the end of the process: Python would end it with exit code 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def _stdout_of(process: psutil.Process) -> Path:
    return Path(f"/proc/{process.pid}/fd/1")


def _tags_lines(launcher: psutil.Process) -> bool:
    # mpirun, as horovodrun calls it: a tag before each line moves a progress bar out of place.
    return any(each.lstrip("-") in ("tag-output", "timestamp-output") for each in launcher.cmdline())


def _is_terminal(path: Path) -> bool:
    descriptor = os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
    try:
        return os.isatty(descriptor)
    finally:
        os.close(descriptor)
