"""``hvdtrain launch``: a command on several ranks of this machine."""

import os
import shlex
import sys
from collections.abc import Sequence

from hvdtrain.config import exclusions
from hvdtrain.config.fields import broken_rule
from hvdtrain.errors import UsageError
from hvdtrain.system.local_job import Controller, choose_ranks, make_launch

_FLAGS_WITH_VALUE = ("--np", "-np", "-n")


def split_command(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divides arguments into launch's own options and the command, which begins with the first other word."""
    own: list[str] = []
    rest = list(arguments)
    while rest and rest[0].startswith("-"):
        flag = rest.pop(0)
        if flag == "--":
            break
        own.append("--np" if flag in _FLAGS_WITH_VALUE else flag)
        if flag in _FLAGS_WITH_VALUE and rest:
            own.append(rest.pop(0))
    return own, rest


def controller_of(mpi: bool, gloo: bool) -> Controller:
    """What ``--mpi`` and ``--gloo`` choose.

    Raises:
        UsageError: both are set.
    """
    if mpi and gloo:
        exclusions.require_compatible(exclusions.facts_from(exclusions.MPI, exclusions.GLOO), known=())
    return "mpi" if mpi else "gloo" if gloo else "auto"


def run(command: Sequence[str], *, np: str = "auto", mpi: bool = False, gloo: bool = False) -> int:
    """Replaces this process by horovodrun, which returns the job's exit code.

    Raises:
        UsageError: there is no command, or an option breaks its rule.
        HvdtrainError: Horovod is not installed.
    """
    if np != "auto" and not (np.isascii() and np.isdigit() and int(np[:9]) > 0):
        raise broken_rule("np", "auto or a whole number of at least 1", np)
    if not command:
        raise UsageError("a command is missing. For example: hvdtrain launch --np 2 python -m hvdtrain")
    ranks, reason = choose_ranks() if np == "auto" else (int(np), "")
    job = make_launch(command, ranks, controller_of(mpi, gloo))
    why = f" ({reason}; --np N sets another number)" if reason else ""
    print(f"hvdtrain launch: {ranks} rank(s){why}: {shlex.join(command)}", file=sys.stderr, flush=True)
    os.execve(job.command[0], job.command, dict(job.env))
