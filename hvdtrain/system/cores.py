"""Cores of this process, and how many threads a rank computes with."""

import contextlib
import math
import os
import platform
from pathlib import Path


def usable_cores() -> int:
    """The number of cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def threads_per_rank(cores: int, local_size: int, bound_to_cores: bool) -> int:
    """A fair share of the host's cores, at least 1."""
    return cores if bound_to_cores else max(1, cores // local_size)


def inter_op_threads(threads: int) -> int:
    """How many operations a rank runs at a time: one if it has one compute thread, else at least 2."""
    return 1 if threads == 1 else max(2, math.ceil(threads / 2))


def processor() -> str:
    """The model of this machine's processor, or its architecture if the system does not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
