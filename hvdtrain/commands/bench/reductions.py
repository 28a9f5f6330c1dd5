"""Allreduce times, compared with a bare MPI_Allreduce of the same size, and the links between hosts."""

from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.commands.doctor import waiting
from hvdtrain.commands.doctor.network import link_speeds, median_s
from hvdtrain.distributed.collectives import Collectives

# Bytes to repetitions.
_SIZES = {4: 100, 64 << 10: 50, 1 << 20: 20, 16 << 20: 5}
_LONGEST_S = 5.0
"""On a slow network, sizes that would take longer are skipped."""


def measure(collectives: Collectives) -> dict[str, Any]:
    """Measures all sizes. Collective: all ranks must call it."""
    share = 2 * (collectives.size - 1) / collectives.size
    rows: list[dict[str, Any]] = []
    for size, times in _SIZES.items():
        if rows and rows[-1]["seconds"] * size / rows[-1]["bytes"] > _LONGEST_S and size > 1 << 20:
            break
        array = np.ones(size // 4, np.float32)
        tensors = [tf.constant(array)]
        name = f"hvdtrain_bench_{size}"
        seconds = median_s(collectives, lambda: collectives.sum_tensors(tensors, name)[0].numpy(), times)  # noqa: B023
        mpi_s = None
        if collectives.mpi_sum(np.ones(1, np.float32)) is not None:
            mpi_s = median_s(collectives, lambda: collectives.mpi_sum(array), times)  # noqa: B023
        rows.append(
            {
                "bytes": size,
                "seconds": seconds,
                "mpi_seconds": mpi_s,
                "over_mpi": None if mpi_s is None else seconds / mpi_s,
                "sent_bits_per_second": 8 * share * size / seconds,
            }
        )
    cores = waiting.busy_cores(collectives)
    return {
        "allreduce": rows,
        "link_bits_per_second": link_speeds(collectives),
        "busy_cores": cores,
        "polling": waiting.advice(cores, collectives),
    }
