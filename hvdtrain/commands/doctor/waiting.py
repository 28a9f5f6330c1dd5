"""How busy ranks are while they wait for the network: MPI polls, Gloo sleeps."""

import time

import numpy as np

from hvdtrain.distributed.collectives import Collectives

_BYTES, _TIMES = 1 << 20, 20
_BUSY_CORES = 0.2
"""MPI takes a core, or what other processes leave of it; Gloo was seen to take from 0.06 to 0.25."""


def busy_cores(collectives: Collectives) -> float:
    """How many cores a rank keeps busy during allreduces of 1 MiB, on average. Collective: all ranks must call it."""
    values = [np.ones(_BYTES // 4, np.float32)]
    collectives.sum(values)
    collectives.barrier()
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    for _ in range(_TIMES):
        collectives.sum(values)
    own = (time.process_time() - start_cpu_s) / (time.perf_counter() - start_s)
    found = collectives.allgather(own)
    return sum(found) / len(found)


def advice(cores: float, collectives: Collectives) -> str | None:
    """Where to look if MPI's polling takes time from computing; None if it does not. Collective.

    Only between hosts: on one, messages take less time than it takes to wake a process up, and a rank without a core of
    its own yields.

    Args:
        cores: :func:`busy_cores`.
    """
    is_mpi = collectives.mpi_sum(np.ones(1, np.float32)) is not None
    if not is_mpi or collectives.cross_size == 1 or cores < _BUSY_CORES:
        return None
    return (
        f"MPI polls: each rank keeps {cores:.2f} cores busy while an allreduce travels. Compare with "
        "horovodrun --gloo, under which ranks sleep while they wait"
    )
