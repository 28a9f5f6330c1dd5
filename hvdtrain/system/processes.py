"""Processes on this host: others, and this one's start."""

import contextlib
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import psutil


def horovodrun_above() -> int | None:
    """The process ID of the ``horovodrun`` that started this process over MPI on this host, if any.

    It has become a shell, ``sh -c "mpirun …"``.
    """
    try:
        for ancestor in psutil.Process().parents():
            arguments = ancestor.cmdline()
            if arguments[1:2] == ["-c"] and arguments[2].lstrip().startswith("mpirun "):
                return ancestor.pid
    except psutil.Error:
        pass
    return None


def end_processes(processes: Sequence[psutil.Process], grace_s: float = 5.0) -> None:
    """Ends processes by SIGTERM, and by SIGKILL those that still run after some seconds."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    for process in psutil.wait_procs(processes, grace_s)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def is_running(pid: int) -> bool:
    """Whether a process runs; False for one that has ended, whether or not its parent has waited for it."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def command_line() -> str:
    """The command that started this process, for messages."""
    return shlex.join(["python", *sys.orig_argv[1:]])


def start_again() -> NoReturn:
    """Replaces this process by one with the same command line, environment and process ID; from any thread."""
    for name in os.listdir("/proc/self/fd"):
        # Some libraries' files would stay open. They are not closed here: other threads still use them.
        with contextlib.suppress(OSError):
            if int(name) > 2:
                os.set_inheritable(int(name), False)
    # Not os.environ: this process has added to it.
    entries = Path("/proc/self/environ").read_bytes().split(b"\0")
    env = dict(entry.split(b"=", 1) for entry in entries if b"=" in entry)
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], env)
