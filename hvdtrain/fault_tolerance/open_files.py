"""The limit of open files of rank 0, which is connected to all other ranks."""

import os
import resource

from hvdtrain.errors import HvdtrainError

OTHER_FILES = 1024
"""Files that rank 0 may open later, where its limit allows: data sets and logs, connections of MPI or Gloo."""


def allow_connections(num_ranks: int) -> None:
    """Raises this process's limit of open files if a connection to every rank would exceed it.

    Raises:
        HvdtrainError: the administrator's limit is too low.
    """
    needed = len(os.listdir("/proc/self/fd")) + num_ranks
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise HvdtrainError(
            f"rank 0 must be able to open {needed} files, one of them for each of {num_ranks} ranks. Received: a limit "
            f"of {hard}. Raise the hard limit of open files (ulimit -Hn) on rank 0's host, or use fewer ranks."
        )
    wanted = needed + OTHER_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
