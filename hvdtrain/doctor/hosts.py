"""The hosts of a job beside each other: one of them is often another one."""

import socket
import statistics
import time

import tensorflow as tf

from hvdtrain import process, runtime
from hvdtrain.collectives import Collectives
from hvdtrain.doctor.checks import Finding
from hvdtrain.failure import host_addresses

_CLOCK_READINGS = 5
# Beyond it, lines of different hosts' logs cannot be put in order.
_CLOCK_LIMIT_S = 1.0


def compare() -> tuple[list[Finding], str]:
    """Every rank has to call it.

    Returns:
        What is wrong, and a table with a column for each host.
    """
    collectives = runtime.current().collectives
    offsets_s = clock_offsets_s(collectives)
    facts = {
        "host": process.host_name(),
        **process.versions(),
        "hvdtrain's code": process.code_digest(),
        "cores": str(process.usable_cores()),
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
    return _differences(columns, offsets_s), "\n\n" + _table(
        [[name, *(each[name] for each in columns)] for name in rows]
    )


def clock_offsets_s(collectives: Collectives) -> list[float]:
    """How far each rank's clock is ahead of rank 0's, to the time that a small reduction takes."""
    readings = []
    for _ in range(_CLOCK_READINGS):
        collectives.barrier()
        readings.append(collectives.allgather(time.time()))
    return [statistics.median(each[rank] - each[0] for each in readings) for rank in range(collectives.size)]


def _differences(columns: list[dict[str, str]], offsets_s: list[float]) -> list[Finding]:
    findings = []
    for name in (*process.versions(), "hvdtrain's code"):
        by_value: dict[str, list[str]] = {}
        for each in columns:
            by_value.setdefault(each[name], []).append(each["host"])
        if len(by_value) > 1:
            told = ", ".join(f"{value} on {', '.join(hosts)}" for value, hosts in by_value.items())
            findings.append(Finding(name, told, "all hosts need the same environment and code"))
    furthest_s = max(map(abs, offsets_s))
    if furthest_s > _CLOCK_LIMIT_S:
        findings.append(Finding("clocks", f"{furthest_s:.1f} s apart", "set them by NTP (chrony)"))
    return findings


def _table(rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
