"""How long the coordinator of an elastic job answers the ranks' requests for addresses when members change.

    launch/run python benchmarks/rendezvous.py

A start of Horovod over Gloo connects all ranks with each other twice. For each other rank, a rank then asks four times
for addresses, those of all connections of that rank (136 bytes each), and once for its name: counted in starts of 4 and
6 ranks. The server is the coordinator's. A process that makes the requests of all ranks, several at once, shares the
machine with it. The requests of only some ranks are made if there are many, and the time is multiplied. Prints seconds,
and saves results/rendezvous.json.
"""

import argparse
import json
import multiprocessing
import socket
import threading
import time
from pathlib import Path

from hvdtrain.distributed.rendezvous import Rendezvous

RESULTS = Path(__file__).resolve().parent / "results" / "rendezvous.json"
ADDRESS_BYTES, NAME = 136, b"ab"
OF_ADDRESSES, OF_NAMES = 4, 1
"""Requests of a rank for each other one."""
AT_ONCE, MOST_REQUESTS = 8, 2048
HOST, SCOPE = "127.0.0.1", "global"


def ask(port: int, request: bytes) -> int:
    """One request as Horovod makes it; returns the number of bytes received."""
    with socket.create_connection((HOST, port)) as connection:
        connection.sendall(request)
        received = 0
        while chunk := connection.recv(1 << 20):
            received += len(chunk)
        return received


def ask_for_all(port: int, ranks: int, asking: int) -> None:
    """Makes the requests of some ranks."""
    keys = [f"{rank}" for rank in range(ranks)] * OF_ADDRESSES + [f"rank_{rank}" for rank in range(ranks)] * OF_NAMES
    remaining = iter(keys * asking)
    lock = threading.Lock()

    def run() -> None:
        while True:
            with lock:
                key = next(remaining, None)
            if key is None:
                return
            received = ask(port, f"GET /{SCOPE}/{key} HTTP/1.0\r\n\r\n".encode())
            assert received > (len(NAME) if "_" in key else (ranks - 1) * ADDRESS_BYTES)

    threads = [threading.Thread(target=run) for _ in range(AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def seconds(ranks: int) -> float:
    """The time of all requests of this number of ranks."""
    rendezvous = Rendezvous(HOST)
    rendezvous.start()
    addresses = b"a" * ((ranks - 1) * ADDRESS_BYTES)
    for rank in range(ranks):
        for key, value in ((f"{rank}", addresses), (f"rank_{rank}", NAME)):
            put = f"PUT /{SCOPE}/{key} HTTP/1.0\r\nContent-Length: {len(value)}\r\n\r\n"
            ask(rendezvous.port, put.encode() + value)
    asking = max(1, min(ranks, MOST_REQUESTS // ranks))
    process = multiprocessing.Process(target=ask_for_all, args=(rendezvous.port, ranks, asking))
    began_s = time.perf_counter()
    process.start()
    process.join()
    taken_s = time.perf_counter() - began_s
    rendezvous.close()
    assert process.exitcode == 0
    return taken_s * ranks / asking


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[4, 16, 48, 64, 256, 1024, 4096])
    arguments = parser.parse_args()
    found = {}
    for ranks in arguments.ranks:
        found[str(ranks)] = seconds(ranks)
        print(
            f"{ranks} ranks: {found[str(ranks)]:.3g} s, {1000 * found[str(ranks)] / ranks**2:.3f} ms a pair of ranks",
            flush=True,
        )
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
