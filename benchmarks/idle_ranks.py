"""How much of a core ranks use while they have nothing to reduce, and how long a reduction takes after a break.

    launch/run mpirun -np 2 python benchmarks/idle_ranks.py
    launch/run horovodrun --gloo -np 2 python benchmarks/idle_ranks.py

Prints for rank 0 the cores that it uses while nothing is reduced, and how many milliseconds a reduction of one number
takes right after another one, and after a break of 50 ms; for rank 1, the cores that it uses while it waits for rank 0.
Medians, lowest and highest of ``--repeats``.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import hvdtrain

topology = hvdtrain.init(seed=0)
import horovod.tensorflow as hvd
import tensorflow as tf

BREAK_S = 0.05


def reduce() -> None:
    hvd.allreduce(tf.constant(1.0), name="number")


def cores_of(work: Callable[[], None]) -> float:
    """The cores that this process uses meanwhile."""
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    work()
    return (time.process_time() - began_cpu_s) / (time.perf_counter() - began_s)


def milliseconds_of_reductions(break_s: float, times: int) -> float:
    took_s = []
    for _ in range(times):
        time.sleep(break_s)
        began_s = time.perf_counter()
        reduce()
        took_s.append(time.perf_counter() - began_s)
    return 1000 * statistics.median(took_s)


def wait_for_rank_0(seconds: float) -> None:
    if topology.rank == 0:
        time.sleep(seconds)
    reduce()


def with_spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="how long ranks are idle, and rank 1 waits")
    arguments = parser.parse_args()
    found: dict[str, list[float]] = {}
    for _ in range(arguments.repeats):
        reduce()
        measured = {
            "idle, cores": cores_of(lambda: time.sleep(arguments.seconds)),
            "after another, ms": milliseconds_of_reductions(0, 200),
            f"after {1000 * BREAK_S:.0f} ms, ms": milliseconds_of_reductions(BREAK_S, 40),
            "waiting for rank 0, cores": cores_of(lambda: wait_for_rank_0(arguments.seconds)),
        }
        for name, value in measured.items():
            found.setdefault(name, []).append(value)
    mine = [name for name in found if (topology.rank == 1) == name.startswith("waiting")]
    if topology.rank <= 1:
        print("\n".join(f"rank {topology.rank}: {name}: {with_spread(found[name])}" for name in mine), flush=True)


if __name__ == "__main__":
    main()
