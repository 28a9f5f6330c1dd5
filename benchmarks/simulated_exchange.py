"""The exchange of a sharded table's rows on up to 4,096 ranks, simulated, flat and hierarchical.

    launch/run python benchmarks/simulated_exchange.py
    launch/run python benchmarks/simulated_exchange.py --check    # beside real exchanges in the lab; as root

As in simulated_averaging.py, nothing is computed or sent: each rank and each line of a host is a clock. The messages
are those of a batch drawn for each rank: 2,048 samples of 8 Zipf-distributed ids (exponent 1.05) of 4,000,000 rows of
64. A rank sends one message to each other rank, in the order of ranks from itself on; messages of a host share its
line. Like Open MPI, ranks send all messages at once, or, in jobs of some sizes, each when the one before has arrived.
The hierarchical exchange first collects, within a host, the messages to ranks of the same number on other hosts; a
rank so sends one message to each other host.

Prints, for each number of ranks, messages of a rank, their sizes, and the time of a step's three exchanges (ids, rows,
gradients of rows); saves results/simulated_exchange.json. With ``--check``: times of real exchanges of such messages
between hosts of the lab, without their fixed cost (that of an exchange of nothing), and the error of the simulation.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from rank_jobs import measured_on_ranks, tell
from simulated_averaging import BETWEEN, PER_HOST, RANKS, WITHIN

from hvdtrain.commands.bench.scaling_model import Link

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "simulated_exchange.json"
ROWS, WIDTH, BATCH, IDS_PER_SAMPLE, EXPONENT = 4_000_000, 64, 2048, 8, 1.05
ID_BYTES, ROW_BYTES = 4, 4 * WIDTH
MESSAGE_S = 1e-6
"""What a message takes of the core that sends it, and of the one that receives it, whatever its size."""
LAB_MBIT, LAB_DELAY_MS = 100.0, 0.5


def rows_asked(ranks: int, placement: str) -> np.ndarray:
    """How many distinct rows each rank's batch needs of each rank, shape ``[ranks, ranks]``.

    Args:
        placement: "sorted": the most frequent ids are the first ones; "random": they are anywhere in the table.
    """
    rng = np.random.default_rng(ranks)
    cumulated = np.cumsum(np.arange(1, ROWS + 1) ** -EXPONENT)
    order = rng.permutation(ROWS) if placement == "random" else np.arange(ROWS)
    counts = np.empty((ranks, ranks), np.int64)
    for rank in range(ranks):
        ids = np.searchsorted(cumulated, rng.random(BATCH * IDS_PER_SAMPLE) * cumulated[-1])
        counts[rank] = np.bincount(order[np.unique(ids)] % ranks, minlength=ranks)
    return counts


def waits_in_open_mpi(num_ranks: int) -> bool:
    """Whether MPI_Alltoallv of Open MPI 4.1 sends a message when the one before has arrived, or all at once."""
    return num_ranks < 4 or 64 <= num_ranks < 128 or 256 <= num_ranks < 1024


def exchange_s(
    sizes: np.ndarray, per_host: int, between: Link, within: Link, *, waits: bool, distances: range | None = None
) -> float:
    """The time of one exchange between ranks that start together.

    Args:
        sizes: bytes from each rank to each other one.
        between: of a host, shared by its ranks. One line leads out, one in.
        waits: whether a rank sends a message when the one before has arrived.
        distances: from a rank to those that it sends messages to, in order (default: all).
    """
    num_ranks = len(sizes)
    ranks = np.arange(num_ranks)
    hosts = ranks // per_host
    sent_s, received_s = np.zeros(num_ranks), np.zeros(num_ranks)
    out_s, in_s = np.zeros(hosts[-1] + 1), np.zeros(hosts[-1] + 1)
    for distance in distances or range(1, num_ranks):
        to, source = (ranks + distance) % num_ranks, (ranks - distance) % num_ranks
        bits = 8.0 * sizes[ranks, to]
        is_far = hosts != hosts[to]
        sent_s += MESSAGE_S + np.where(is_far, 0.0, bits / within.bits_per_second)
        arrival_s = sent_s + within.latency_s
        if is_far.any():
            line_s = np.where(is_far, bits / between.bits_per_second, 0.0)
            ready_s = np.where(is_far, sent_s, np.inf).reshape(-1, per_host).min(1)
            leaving_s = line_s.reshape(-1, per_host).sum(1)
            out_s = np.where(leaving_s > 0, np.maximum(out_s, ready_s) + leaving_s, out_s)
            far_s = np.maximum(out_s[hosts], sent_s) + between.latency_s
            entering_s = line_s[source].reshape(-1, per_host).sum(1)
            last_s = np.where(is_far, far_s, 0.0)[source].reshape(-1, per_host).max(1)
            # A line carries on with what arrives while it is busy.
            in_s = np.maximum(in_s + entering_s, last_s)
            arrival_s = np.where(is_far, np.maximum(in_s[hosts[to]], far_s), arrival_s)
        received_s = np.maximum(received_s, arrival_s[source]) + MESSAGE_S
        if waits:
            sent_s = np.maximum(sent_s, received_s)
    return float(max(sent_s.max(), received_s.max()))


def flat_s(sizes: np.ndarray) -> float:
    return exchange_s(sizes, PER_HOST, BETWEEN, WITHIN, waits=waits_in_open_mpi(len(sizes)))


def hierarchical_s(sizes: np.ndarray) -> float:
    """Within hosts, then between the ranks of the same number of all hosts."""
    num_ranks, num_hosts = len(sizes), len(sizes) // PER_HOST
    by_place = sizes.reshape(num_hosts, PER_HOST, num_hosts, PER_HOST)  # host, rank, to host, to rank
    within_s = max(exchange_s(each, PER_HOST, BETWEEN, WITHIN, waits=False) for each in by_place.sum(2))
    collected = np.zeros_like(by_place)
    for place in range(PER_HOST):
        collected[:, place, :, place] = by_place[..., place].sum(1)
    others = range(PER_HOST, num_ranks, PER_HOST)
    collected = collected.reshape(num_ranks, num_ranks)
    return within_s + exchange_s(collected, PER_HOST, BETWEEN, WITHIN, waits=False, distances=others)


def step_of(counts: np.ndarray, time_s: Any) -> float:
    """The time of a step's exchanges: ids to owners, rows from owners, gradients of rows to owners."""
    return sum(time_s(each) for each in (ID_BYTES * counts, ROW_BYTES * counts.T, ROW_BYTES * counts))


def simulate(ranks: int, placement: str) -> dict[str, Any]:
    counts = rows_asked(ranks, placement)
    to_others = counts[~np.eye(ranks, dtype=bool)]
    served = counts.sum(0)
    hosts = served.reshape(-1, PER_HOST).sum(1)
    result = {
        "ranks": ranks,
        "placement": placement,
        "messages_of_a_rank": {"flat": ranks - 1, "hierarchical": PER_HOST - 1 + ranks // PER_HOST - 1},
        "message_bytes": {
            "rows, median": float(ROW_BYTES * np.median(to_others)),
            "rows, largest": int(ROW_BYTES * to_others.max()),
            "hierarchical, mean": float(ROW_BYTES * to_others.mean() * PER_HOST),
        },
        "rows_of_busiest_over_mean": {"rank": served.max() / served.mean(), "host": hosts.max() / hosts.mean()},
        "exchanges_ms": {
            "flat": 1000 * step_of(counts, flat_s),
            "hierarchical": 1000 * step_of(counts, hierarchical_s),
        },
    }
    times, busiest = result["exchanges_ms"], result["rows_of_busiest_over_mean"]
    sizes = result["message_bytes"]
    print(
        f"{ranks} ranks, frequent ids {placement}: flat {result['messages_of_a_rank']['flat']:,} messages of "
        f"{sizes['rows, median']:,.0f} B (largest {sizes['rows, largest']:,} B), {times['flat']:.1f} ms a step; "
        f"hierarchical {result['messages_of_a_rank']['hierarchical']:,} messages, {times['hierarchical']:.1f} ms; the "
        f"busiest rank serves {busiest['rank']:.2f} times the mean, host {busiest['host']:.2f}",
        flush=True,
    )
    return result


def run_real(samples: int) -> None:
    """Runs on each rank of the lab; prints the milliseconds of exchanges as JSON."""
    import hvdtrain

    topology = hvdtrain.init(seed=0)
    import tensorflow as tf

    from hvdtrain.distributed import runtime

    collectives = runtime.current().collectives
    counts = rows_asked(topology.size, "random")

    def times_ms(to_others: np.ndarray, name: str) -> list[float]:
        # What a rank sends to itself does not leave it.
        lengths = np.where(np.arange(topology.size) == topology.rank, 0, to_others[topology.rank])
        rows = tf.zeros([int(lengths.sum()), WIDTH])
        exchange = tf.function(lambda: collectives.exchange_parts(rows, tf.constant(lengths, tf.int32), name)[0])
        found = []
        for _ in range(samples + 3):
            collectives.barrier()
            began_s = time.perf_counter()
            exchange()
            found.append(1000 * (time.perf_counter() - began_s))
        return found[3:]

    tell({"rank": topology.rank, "rows": times_ms(counts, "rows"), "nothing": times_ms(0 * counts, "nothing")})


def check(samples: int) -> list[dict[str, Any]]:
    """Real exchanges in the lab beside simulated ones."""
    sys.path.insert(0, str(HERE.parent / "launch" / "lab"))
    from laboratory import Laboratory

    results = []
    for num_hosts, per_host in ((2, 1), (2, 2), (4, 1), (4, 2)):
        with Laboratory(num_hosts, rate_mbit=LAB_MBIT, delay_ms=LAB_DELAY_MS) as lab:
            launcher = [sys.executable, str(HERE.parent / "launch" / "mpirun.py"), "-H", lab.slots(per_host)]
            options = ["--real", "--samples", str(samples)]
            ranks = num_hosts * per_host
            found = measured_on_ranks(ranks, __file__, *options, launcher=lab.command(lab.names[0], launcher))
        # An exchange ends with its last rank.
        rows, nothing = (
            statistics.median(max(each) for each in zip(*(one[name] for one in found), strict=True))
            for name in ("rows", "nothing")
        )
        counts = rows_asked(ranks, "random")
        lines = Link(0.0, 1e6 * LAB_MBIT)
        waits = waits_in_open_mpi(ranks)
        simulated = 1000 * exchange_s(ROW_BYTES * counts, per_host, lines, WITHIN, waits=waits)
        error = simulated / (rows - nothing) - 1
        print(
            f"{num_hosts} hosts of {per_host} ranks, {LAB_MBIT:g} Mbit/s: rows {rows:.1f} ms, nothing "
            f"{nothing:.1f} ms; simulated {simulated:.1f} ms, {error:+.1%} of the difference",
            flush=True,
        )
        results.append(
            {
                "hosts": num_hosts,
                "ranks_per_host": per_host,
                "rows_ms": rows,
                "nothing_ms": nothing,
                "simulated_ms": simulated,
                "error": error,
            }
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=RANKS)
    parser.add_argument("--check", action="store_true", help="compare with the lab instead")
    parser.add_argument("--samples", type=int, default=20, help="of each real exchange")
    parser.add_argument("--real", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.real:
        run_real(arguments.samples)
        return
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if arguments.check:
        results["check"] = check(arguments.samples)
    else:
        results["simulated"] = [simulate(ranks, how) for ranks in arguments.ranks for how in ("random", "sorted")]
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
