"""``hvdtrain check``: the first steps of a program on several ranks, compared with those of one process."""

import os
import shlex
import sys
from collections.abc import Sequence

from hvdtrain.commands.launch import controller_of
from hvdtrain.config.fields import broken_rule
from hvdtrain.errors import UsageError
from hvdtrain.system.environment import ONLY_CHECK
from hvdtrain.system.local_job import make_launch


def run(command: Sequence[str], *, np: str = "2", mpi: bool = False, gloo: bool = False) -> int:
    """Replaces this process by a job that ends after the checked steps.

    Raises:
        UsageError: there is no command, or an option breaks its rule.
        HvdtrainError: Horovod is not installed.
    """
    if not (np.isascii() and np.isdigit() and int(np[:9]) > 1):
        raise broken_rule("np", "a whole number of at least 2", np)
    if not command:
        raise UsageError("a program is missing. For example: hvdtrain check --np 2 train.py")
    job = make_launch(command, int(np), controller_of(mpi, gloo))
    print(f"hvdtrain check: {np} ranks: {shlex.join(command)}", file=sys.stderr, flush=True)
    os.execve(job.command[0], job.command, {**job.env, ONLY_CHECK: "1"})
