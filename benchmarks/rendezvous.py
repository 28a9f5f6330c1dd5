"""How long the ranks of an elastic job wait for each other's addresses when members change.

    launch/run python benchmarks/rendezvous.py

A start of Horovod over Gloo connects all ranks with each other twice. For each other rank, a rank then asks four times
for addresses, those of all connections of that rank (136 bytes each), and once for its name: counted in starts of 4 and
6 ranks. A server in the rank answers; each rank sends its own addresses to the coordinator, and asks it once for all
names and once for all addresses. Measured are the coordinator, with the requests of all ranks, made by another process,
several at once; and then one rank's server. They share the machine with the processes that ask. Connections themselves
are not made. Prints seconds, and saves their sums in results/rendezvous.json.
"""

import argparse
import json
import multiprocessing
import socket
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from hvdtrain.distributed.local_rendezvous import local_rendezvous
from hvdtrain.distributed.rendezvous import Rendezvous

RESULTS = Path(__file__).resolve().parent / "results" / "rendezvous.json"
ADDRESS_BYTES, NAME = 136, b"ab"
AT_ONCE, TIMES = 8, 2
HOST, SCOPE = "127.0.0.1", "global"


def ask(port: int, method: str, key: str, value: bytes = b"") -> int:
    """One request as Horovod makes it; returns the number of bytes received."""
    with socket.create_connection((HOST, port)) as connection:
        connection.sendall(f"{method} /{SCOPE}/{key} HTTP/1.0\r\nContent-Length: {len(value)}\r\n\r\n".encode() + value)
        received = 0
        while chunk := connection.recv(1 << 20):
            received += len(chunk)
        return received


def ask_for_all(port: int, ranks: int) -> None:
    """Makes all ranks' requests to the coordinator."""
    addresses = b"a" * ((ranks - 1) * ADDRESS_BYTES)

    def put(rank: int) -> None:
        ask(port, "PUT", f"rank_{rank}", NAME)
        ask(port, "PUT", str(rank), addresses)

    def get(rank: int) -> None:
        assert ask(port, "GET", f"names-{ranks}") > ranks * len(NAME)
        assert ask(port, "GET", f"addresses-{rank}-{ranks}") > ranks * ADDRESS_BYTES

    for each in (put, get):
        in_threads(each, range(ranks))


def ask_as_horovod(port: int, ranks: int) -> None:
    """Makes the requests of rank 0."""
    for other in range(1, ranks):
        ask(port, "GET", f"rank_{other}")
        for _ in range(2):
            assert ask(port, "GET", str(other)) > (ranks - 1) * ADDRESS_BYTES


def in_threads(run: Callable[[int], None], items: Iterable[int]) -> None:
    remaining, lock = iter(items), threading.Lock()

    def run_all() -> None:
        while True:
            with lock:
                item = next(remaining, None)
            if item is None:
                return
            run(item)

    threads = [threading.Thread(target=run_all) for _ in range(AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def seconds_of(target: Callable[[int, int], None], port: int, ranks: int) -> float:
    """The time of a process that asks."""
    process = multiprocessing.Process(target=target, args=(port, ranks))
    began_s = time.perf_counter()
    process.start()
    process.join()
    assert process.exitcode == 0
    return time.perf_counter() - began_s


def seconds(ranks: int) -> tuple[float, float]:
    """The time of the coordinator's answers to this number of ranks, and of those of one rank's server."""
    rendezvous = Rendezvous(HOST)
    rendezvous.start()
    by_coordinator = seconds_of(ask_for_all, rendezvous.port, ranks)
    place = {"rank": 0, "size": ranks, "local_rank": 0, "local_size": 1, "cross_rank": 0, "cross_size": ranks}
    with local_rendezvous(place, (HOST, rendezvous.port)) as (_, port):
        by_rank = seconds_of(ask_as_horovod, port, ranks)
    rendezvous.close()
    return TIMES * by_coordinator, TIMES * by_rank


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[4, 16, 64, 256, 1024, 4096])
    arguments = parser.parse_args()
    found = {}
    for ranks in arguments.ranks:
        by_coordinator, by_rank = seconds(ranks)
        found[str(ranks)] = by_coordinator + by_rank
        print(f"{ranks} ranks: coordinator {by_coordinator:.3g} s, a rank's server {by_rank:.3g} s", flush=True)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
