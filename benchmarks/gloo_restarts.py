"""How long the ranks of an elastic job take to connect anew, by number of ranks.

    launch/run python benchmarks/gloo_restarts.py --ranks 2 4 8 16 --restarts 10

Starts processes that do nothing but leave each other and connect again, as the ranks of an elastic job do when one is
lost or joins. Prints the time from the first rank's start to the end of the first allreduce on all of them: median, and
the range of the middle half and of all.
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from hvdtrain.distributed.elastic import ElasticCollectives
from hvdtrain.distributed.rendezvous import Rendezvous
from hvdtrain.fault_tolerance.elastic.generation import Place
from hvdtrain.system import environment

HOST = "127.0.0.1"
POLL_S = 0.002


def place(rank: int, size: int) -> dict[str, int]:
    return dataclasses.asdict(Place(rank, size, rank, size, 0, 1))


def wait_for(path: Path) -> str:
    while not path.exists():
        time.sleep(POLL_S)
    return path.read_text()


def write(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}")
    part.write_text(text)
    part.rename(path)


def run_rank(rank: int, size: int, folder: Path, restarts: int) -> None:
    alone = Rendezvous(HOST)
    alone.start()
    environment.choose_settings_for_restarts(deterministic=False)
    environment.set_place(place(0, 1), "lo", (HOST, alone.port))
    collectives = ElasticCollectives(environment.launcher())
    write(folder / f"ready-{rank}", "")
    for number in range(restarts):
        port = int(wait_for(folder / f"port-{number}"))
        start_s = time.time()
        collectives.restart(place(rank, size), "lo", (HOST, port))
        collectives.sum([np.ones(1000)])
        write(folder / f"times-{number}-{rank}", json.dumps([start_s, time.time()]))
    os._exit(0)  # Without a shutdown that all ranks would have to begin together.


def measure(size: int, restarts: int) -> list[float]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = [
            [sys.executable, __file__, "--rank", str(rank), str(size), name, str(restarts)] for rank in range(size)
        ]
        processes = [subprocess.Popen(line, stderr=subprocess.DEVNULL) for line in lines]
        try:
            for rank in range(size):
                wait_for(folder / f"ready-{rank}")
            seconds = []
            for number in range(restarts):
                rendezvous = Rendezvous(HOST)
                rendezvous.start()
                write(folder / f"port-{number}", str(rendezvous.port))
                times = [json.loads(wait_for(folder / f"times-{number}-{rank}")) for rank in range(size)]
                seconds.append(max(end for _, end in times) - min(start for start, _ in times))
                rendezvous.close()
            return seconds
        finally:
            for process in processes:
                process.kill()
                process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--restarts", type=int, default=10)
    parser.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        rank, size, folder, restarts = arguments.rank
        run_rank(int(rank), int(size), Path(folder), int(restarts))
    for size in arguments.ranks:
        seconds = sorted(measure(size, arguments.restarts))
        quarter, median, three_quarters = statistics.quantiles(seconds, n=4)
        print(
            f"{size} ranks: {median:.2f} s (middle half {quarter:.2f} to {three_quarters:.2f}, "
            f"all {seconds[0]:.2f} to {seconds[-1]:.2f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
