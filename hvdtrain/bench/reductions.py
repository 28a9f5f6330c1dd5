"""What an allreduce takes, beside a bare MPI_Allreduce of the same size and the links between the hosts."""

from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.collectives import Collectives
from hvdtrain.doctor.network import link_speeds, median_s

# Bytes, and how often.
_SIZES = {4: 100, 64 << 10: 50, 1 << 20: 20, 16 << 20: 5}
_LONGEST_S = 5.0
"""On a slow network larger messages than fit into it are left out."""


def measure(collectives: Collectives) -> dict[str, Any]:
    """Every rank has to call it."""
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
        if collectives.sum_by_mpi(np.ones(1, np.float32)) is not None:
            mpi_s = median_s(collectives, lambda: collectives.sum_by_mpi(array), times)  # noqa: B023
        rows.append(
            {
                "bytes": size,
                "seconds": seconds,
                "mpi_seconds": mpi_s,
                "over_mpi": None if mpi_s is None else seconds / mpi_s,
                "sent_bits_per_second": 8 * share * size / seconds,
            }
        )
    return {"allreduce": rows, "link_bits_per_second": link_speeds(collectives)}
