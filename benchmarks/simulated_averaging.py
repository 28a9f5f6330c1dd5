"""Steps on up to 4,096 ranks, simulated, compared with what bench predicts for them.

    launch/run python benchmarks/simulated_averaging.py

Nothing is computed or sent: each rank is a clock. A step takes each rank as long as a step drawn at random. Like
Horovod, an allreduce starts when all of its ranks are ready, and takes what is ready together; in each phase of its
ring (P. Patarasuk, X. Yuan, 2009), a rank waits for its left neighbour and for the link between them. Bench instead
computes the expected time of the slowest rank, and that of a ring whose links are all like the slowest. Prints both
results and their difference, for sync mode, local SGD, and local SGD with ``--average-across host``, and saves them to
results/simulated_averaging.json.

Assumed: 8 ranks per host, 25 Gbit/s and 20 us between hosts, 100 Gbit/s and 5 us within; 102 MB of gradients
(ResNet-50) in six buckets that are ready after 0.4 to 1.0 of a step; steps of 200 ms, normally distributed with 3 %, of
which one in a hundred takes 1.5 times as long; averages every 16 steps.
"""

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hvdtrain.commands.bench import scaling_model
from hvdtrain.commands.bench.scaling_model import Averaging, Cluster, Link, MeasuredStep

RESULTS = Path(__file__).resolve().parent / "results" / "simulated_averaging.json"
PER_HOST, EVERY = 8, 16
BETWEEN, WITHIN = Link(20e-6, 25e9), Link(5e-6, 100e9)
BUCKETS = [(17_000_000, float(ready)) for ready in np.linspace(0.4, 1.0, 6)]
SIZE = sum(size for size, _ in BUCKETS)
RANKS = (16, 64, 256, 1024, 4096)
PREDICTIONS = {
    "sync": scaling_model.sync_step,
    "local": functools.partial(scaling_model.local_step, averaging=Averaging(EVERY)),
    "local across hosts": functools.partial(scaling_model.local_across_hosts_step, averaging=Averaging(EVERY)),
}


def drawn_s(rng: np.random.Generator, shape: int | tuple[int, ...]) -> np.ndarray:
    """Times of steps without communication."""
    return 0.2 * rng.normal(1, 0.03, shape) * np.where(rng.random(shape) < 0.01, 1.5, 1.0)


def ring_s(size: float, links: list[Link]) -> float:
    """The time of a ring allreduce of ranks that start together; link i leads to rank i."""
    chunk_bits = 8 * size / len(links)
    phase_s = np.array([link.latency_s + chunk_bits / link.bits_per_second for link in links])
    clocks_s = np.zeros(len(links))
    for _ in range(2 * (len(links) - 1)):
        clocks_s = np.maximum(clocks_s, np.roll(clocks_s, 1)) + phase_s
    return float(clocks_s.max())


@functools.cache
def within_host_s(size: float) -> float:
    return ring_s(size, [WITHIN] * PER_HOST)


@functools.cache
def over_all_s(size: float, ranks: int, hierarchical: bool, between: Link = BETWEEN) -> float:
    """An allreduce over all ranks; hierarchical: full hosts only."""
    if not hierarchical:
        return ring_s(size, [WITHIN if rank % PER_HOST or ranks <= PER_HOST else between for rank in range(ranks)])
    # A reduce-scatter and an all-gather within hosts take together as long as an allreduce. In between, each rank of a
    # host reduces its part with the other hosts' ranks of the same number, over an equal share of the link.
    share = Link(between.latency_s, between.bits_per_second / PER_HOST)
    return within_host_s(size) + ring_s(size / PER_HOST, [share] * (ranks // PER_HOST))


def sync_step_s(step_s: np.ndarray, reduce_s: Callable[[float], float]) -> float:
    """A step of ranks that start together, with the reduction of its gradients."""
    slowest_s = float(step_s.max())
    return max(slowest_s, scaling_model.communication_end_s(BUCKETS, slowest_s, reduce_s))


def simulated_s(mode: str, ranks: int, rounds: int, *, hierarchical: bool) -> float:
    """The mean time of a step."""
    rng = np.random.default_rng([ranks, rounds])
    now_s = 0.0
    for _ in range(rounds):
        step_s = drawn_s(rng, (EVERY, ranks))
        average_s = over_all_s(SIZE, ranks, hierarchical)
        if mode == "sync":
            now_s += sum(sync_step_s(each, lambda size: over_all_s(size, ranks, hierarchical)) for each in step_s)
        elif mode == "local":
            now_s += float(step_s.sum(axis=0).max()) + average_s
        else:
            by_host = step_s.reshape(EVERY, -1, PER_HOST)
            hosts_s = [sum(sync_step_s(each, within_host_s) for each in by_host[:, i]) for i in range(by_host.shape[1])]
            now_s += max(hosts_s) + average_s
    return now_s / (rounds * EVERY)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=RANKS)
    parser.add_argument("--rounds", type=int, default=40, help=f"of {EVERY} steps")
    arguments = parser.parse_args()
    measured = MeasuredStep(drawn_s(np.random.default_rng(0), 4000), BUCKETS)
    rows = []
    for ranks in arguments.ranks:
        cluster = Cluster(ranks // PER_HOST, PER_HOST, BETWEEN, WITHIN)
        for mode, predict in PREDICTIONS.items():
            for hierarchical in (False, True):
                step_ms = 1000 * simulated_s(mode, ranks, arguments.rounds, hierarchical=hierarchical)
                predicted_ms = 1000 * predict(measured, cluster, hierarchical=hierarchical).step_s
                allreduce = "hierarchical" if hierarchical else "flat"
                row = {"ranks": ranks, "mode": mode, "allreduce": allreduce}
                rows.append({**row, "simulated_ms": step_ms, "predicted_ms": predicted_ms})
                result = f"{step_ms:.1f} ms, predicted {predicted_ms:.1f} ms ({predicted_ms / step_ms - 1:+.1%})"
                print(f"{ranks} ranks, {mode}, {allreduce}: {result}", flush=True)
    RESULTS.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


if __name__ == "__main__":
    main()
