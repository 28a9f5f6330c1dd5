"""Comparison of a job's hosts: finds the one that differs."""

import socket
import statistics
import time

import tensorflow as tf

from hvdtrain.commands.doctor.checks import Finding
from hvdtrain.commands.tables import aligned
from hvdtrain.distributed import runtime
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.system import cores, network, versions
from hvdtrain.system.network import host_addresses

_CLOCK_READINGS = 5
# Larger offsets make it impossible to order log lines of different hosts.
_CLOCK_LIMIT_S = 1.0


def compare() -> tuple[list[Finding], str]:
    """Compares all hosts. Collective: all ranks must call it.

    Returns:
        Findings about differences, and a table with a column per host.
    """
    collectives = runtime.current().collectives
    offsets_s = clock_offsets_s(collectives)
    facts = {
        "host": network.host_name(),
        **versions.versions(),
        "hvdtrain's code": versions.code_digest(),
        "cores": str(cores.usable_cores()),
        "GPUs": str(len(tf.config.list_physical_devices("GPU"))),
        "addresses": ", ".join(host_addresses()) or "none",
        "interfaces": ", ".join(name for _, name in socket.if_nameindex()),
        "clock": f"{1000 * offsets_s[collectives.rank]:+.1f} ms",
    }
    gathered = collectives.allgather(facts)
    ranks: dict[str, list[int]] = {}
    for rank, each in enumerate(gathered):
        ranks.setdefault(each["host"], []).append(rank)
    columns = [{**gathered[numbers[0]], "ranks": str(len(numbers))} for numbers in ranks.values()]
    rows = ["host", "ranks", *(name for name in facts if name != "host")]
    cells = [[name, *(each[name] for each in columns)] for name in rows]
    return _differences(columns, offsets_s), "\n\n" + "\n".join(aligned(cells, num_left=len(cells[0])))


def clock_offsets_s(collectives: Collectives) -> list[float]:
    """Each rank's clock offset from rank 0; the error is the time of a small allreduce."""
    readings = []
    for _ in range(_CLOCK_READINGS):
        collectives.barrier()
        readings.append(collectives.allgather(time.time()))
    return [statistics.median(each[rank] - each[0] for each in readings) for rank in range(collectives.size)]


def _differences(columns: list[dict[str, str]], offsets_s: list[float]) -> list[Finding]:
    findings = []
    for name in (*versions.versions(), "hvdtrain's code"):
        by_value: dict[str, list[str]] = {}
        for each in columns:
            by_value.setdefault(each[name], []).append(each["host"])
        if len(by_value) > 1:
            state = ", ".join(f"{value} on {', '.join(hosts)}" for value, hosts in by_value.items())
            findings.append(Finding(name, state, "all hosts need the same environment and code"))
    largest_s = max(map(abs, offsets_s))
    if largest_s > _CLOCK_LIMIT_S:
        findings.append(Finding("clocks", f"{largest_s:.1f} s apart", "synchronize them with NTP (chrony)"))
    return findings
