"""Open MPI's settings for jobs on several hosts."""

from collections.abc import Mapping
from pathlib import Path

# Protocol for long messages over TCP. MPI_Allreduce of 16 MiB on two hosts reached 0.61 of a 100 Mbit/s link with Open
# MPI's default and 0.94 with this setting (1 Gbit/s: 0.60 and 0.86). On a single host, limited only by the cores, the
# default is a third faster.
# Messages longer than the eager limit (64 KiB by default) wait for an answer of the receiver after their first part. On
# two hosts with 1 Gbit/s, MPI_Sendrecv of 1 MB took 15.1 ms, and 13.7 with this limit; MPI_Allreduce of 1 MiB 20.1 and
# 18.2 ms; of 16 MiB 192 and 196 ms.
_OPEN_MPI_TCP = {"OMPI_MCA_btl_tcp_flags": "send", "OMPI_MCA_btl_tcp_eager_limit": str(4 << 20)}
# Reduction algorithm. MPI_Allreduce of 16 MiB on 100 Mbit/s links, default and these rules: 4.5 and 2.2 s on 3 hosts,
# 3.1 and 2.7 s on 4 hosts. Between ranks of one host the default is faster.
_OPEN_MPI_RING = {
    "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
    "OMPI_MCA_coll_tuned_dynamic_rules_filename": str(Path(__file__).with_name("open_mpi_allreduce.rules")),
}


def with_network_settings(env: Mapping[str, str]) -> dict[str, str]:
    """Adds Open MPI's settings for several hosts to an environment; existing values take precedence."""
    is_chosen = any(name.startswith("OMPI_MCA_coll_tuned_") for name in env)
    return {**_OPEN_MPI_TCP, **({} if is_chosen else _OPEN_MPI_RING), **env}
