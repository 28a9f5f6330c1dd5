"""Network measurements between hosts: allreduce times, and the throughput of a single TCP connection."""

import contextlib
import socket
import statistics
import time
from collections.abc import Callable

import numpy as np

from hvdtrain.distributed import runtime
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.system import network
from hvdtrain.system.network import host_addresses

# Bytes to repetitions.
_SIZES = {4: 30, 64 << 10: 10, 1 << 20: 5, 16 << 20: 3}
_LINK_S = 0.5
_CHUNK_BYTES = 1 << 20
_CONNECT_S = 5.0


def measure() -> str:
    """Returns a table of measurements. Collective: all ranks must call it."""
    collectives = runtime.current().collectives
    lines = [f"{'allreduce of':>12}  {'takes':>10}  {'each rank sends':>16}"]
    for size, times in _SIZES.items():
        seconds = allreduce_s(collectives, size, times)
        # A ring sends 2 (N - 1) / N of the bytes from each rank.
        sent_bits = 8 * 2 * (collectives.size - 1) / collectives.size * size
        lines.append(f"{_bytes(size):>12}  {1000 * seconds:>7.2f} ms  {sent_bits / seconds / 1e6:>9.0f} Mbit/s")
    for host, bits_per_s in link_speeds(collectives).items():
        speed = "cannot be reached over TCP" if bits_per_s is None else f"{bits_per_s / 1e6:.0f} Mbit/s"
        lines.append(f"one connection from {network.host_name()} to {host}: {speed}")
    return "\n".join(lines)


def allreduce_s(collectives: Collectives, size: int, times: int) -> float:
    """The median time of an allreduce on the slowest rank, in seconds."""
    values = [np.ones(size // 4, np.float32)]
    return median_s(collectives, lambda: collectives.sum(values), times)


def median_s(collectives: Collectives, operation: Callable[[], object], times: int) -> float:
    """The median time of a collective operation on the slowest rank, in seconds."""
    operation()
    taken_s = []
    for _ in range(times):
        collectives.barrier()
        began_s = time.perf_counter()
        operation()
        taken_s.append(time.perf_counter() - began_s)
    return max(collectives.allgather(statistics.median(taken_s)))


def link_speeds(collectives: Collectives) -> dict[str, float | None]:
    """Bits per second from rank 0's host to each other host, measured in sequence; None: unreachable."""
    hosts = collectives.allgather(network.host_name())
    found: dict[str, float | None] = {}
    for host in dict.fromkeys(hosts):
        if host != hosts[0]:
            found[host] = _send_to(collectives, hosts.index(host))
    return found


def _send_to(collectives: Collectives, receiver: int) -> float | None:
    """Rank 0 sends for half a second, the receiver counts, the others wait. Collective: all ranks must call it."""
    with contextlib.ExitStack() as stack:
        listener = None
        if collectives.rank == receiver:
            listener = stack.enter_context(socket.create_server(("", 0)))
            listener.settimeout(_CONNECT_S * (len(host_addresses()) + 1))
        offer = None if listener is None else (host_addresses(), listener.getsockname()[1])
        offered = collectives.allgather(offer)[receiver]
        speed = None
        if collectives.rank == 0:
            assert offered is not None
            _send(*offered)
        elif listener is not None:
            speed = _count(listener)
        return collectives.allgather(speed)[receiver]


def _send(addresses: list[str], port: int) -> None:
    chunk = bytes(_CHUNK_BYTES)
    for address in addresses:
        with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=_CONNECT_S) as link:
            end_s = time.monotonic() + _LINK_S
            while time.monotonic() < end_s:
                link.sendall(chunk)
            return


def _count(listener: socket.socket) -> float | None:
    with contextlib.suppress(OSError):
        link, _ = listener.accept()
        with link:
            received = len(link.recv(_CHUNK_BYTES))
            began_s = time.perf_counter()
            counted = 0
            while part := link.recv(_CHUNK_BYTES):
                counted += len(part)
            return 8 * counted / (time.perf_counter() - began_s) if received and counted else None
    return None


def _bytes(size: int) -> str:
    return next(f"{size >> shift} {unit}" for shift, unit in ((20, "MiB"), (10, "KiB"), (0, "B")) if size >> shift)
