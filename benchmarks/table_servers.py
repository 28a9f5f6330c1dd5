"""Steps with sharded tables beside TensorFlow's parameter servers, on one host or on hosts of the lab.

    launch/run python benchmarks/table_servers.py                    # two ranks; two servers and two workers
    launch/run python benchmarks/table_servers.py --rate-mbit 1000   # on two hosts; as root, with iproute2 and sshd

Ids are Zipf-distributed (exponent 1.05). A job of each kind in turn, ``--repeats`` times: ranks with a sharded table,
or with replicated ones whose gradients are sparse or dense; in the last job two servers hold the table, and each of two
workers asks for the distinct rows of its batch, and pushes their gradients, without waiting for the other
(``tf.distribute.ParameterServerStrategy`` in a loop without Keras). Prints how many times as long as a step of the
sharded table the others take: medians over repeats, lowest and highest. The last results are in
``benchmarks/results/table_servers.json``.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LAUNCH = HERE.parent / "launch"
sys.path.insert(0, str(LAUNCH / "lab"))
from laboratory import Laboratory
from rank_jobs import measured_on_ranks

MPIRUN = [sys.executable, str(LAUNCH / "mpirun.py")]
RANKS, FIRST_PORT, DELAY_MS, TIMEOUT_S = 2, 4470, 0.5, 600
BLOCK = 8
"""Steps of a measurement, as in peers/table_server.py."""


def times_of_servers(arguments: argparse.Namespace, optimizer: str, lab: Laboratory | None) -> list[float]:
    """The milliseconds of a step with servers: one batch on each worker."""
    hosts = [0, 0, 1, 0, 1]
    jobs = [("chief", 0), ("worker", 0), ("worker", 1), ("ps", 0), ("ps", 1)]
    cluster: dict[str, list[str]] = {}
    for port, (host, (job, _)) in enumerate(zip(hosts, jobs, strict=True), FIRST_PORT):
        address = "127.0.0.1" if lab is None else lab.address(lab.names[host])
        cluster.setdefault(job, []).append(f"{address}:{port}")
    options = ["--rows", str(arguments.rows), "--batch-size", str(arguments.batch_size)]
    options += ["--optimizer", optimizer, "--pairs", str(arguments.pairs)]
    processes = []
    try:
        for host, (job, task) in reversed([*zip(hosts, jobs, strict=True)]):
            line = [sys.executable, str(HERE / "peers" / "table_server.py"), job, str(task), json.dumps(cluster)]
            line += options
            command = line if lab is None else lab.command(lab.names[host], line)
            output = subprocess.PIPE if job == "chief" else subprocess.DEVNULL
            processes.append(subprocess.Popen(command, stdout=output, stderr=subprocess.DEVNULL, text=True))
        chief = processes[-1]
        output_text = chief.communicate(timeout=TIMEOUT_S)[0]
        if chief.returncode != 0:
            sys.exit(f"the chief of the parameter servers failed with {chief.returncode}:\n{output_text}")
    finally:
        for each in processes:
            each.kill()
            each.wait()
    times: list[float] = json.JSONDecoder().raw_decode(output_text.partition("MEASURED ")[2])[0]
    return times


def times_of_ranks(arguments: argparse.Namespace, optimizer: str, lab: Laboratory | None, kind: str) -> list[float]:
    """The milliseconds of a step of ranks with a table of this kind."""
    options = ["--run", "--rows", str(arguments.rows), "--kinds", kind]
    options += ["--batch-size", str(arguments.batch_size), "--pairs", str(arguments.pairs), "--optimizer", optimizer]
    options += ["--block", str(BLOCK)]
    launcher = None if lab is None else lab.command(lab.names[0], [*MPIRUN, "-H", lab.slots()])
    found = measured_on_ranks(RANKS, str(HERE / "sharded_embedding.py"), *options, launcher=launcher)
    times: list[float] = found[0]["times"][kind]
    return times


def compare(arguments: argparse.Namespace, optimizer: str, lab: Laboratory | None) -> dict[str, Any]:
    medians: dict[str, list[float]] = {}
    for _ in range(arguments.repeats):
        found = {kind: times_of_ranks(arguments, optimizer, lab, kind) for kind in arguments.kinds}
        found["servers"] = times_of_servers(arguments, optimizer, lab)
        for kind, times in found.items():
            medians.setdefault(kind, []).append(statistics.median(times))
    ratios = {
        kind: [other / own for other, own in zip(each, medians["sharded"], strict=True)]
        for kind, each in medians.items()
        if kind != "sharded"
    }
    text = "; ".join(f"{k} {statistics.median(r):.2f} ({min(r):.2f} to {max(r):.2f})" for k, r in ratios.items())
    link = "one host" if lab is None else f"two hosts, {arguments.rate_mbit:g} Mbit/s"
    own = statistics.median(medians["sharded"])
    print(f"{link}, {optimizer}: step {own:.1f} ms sharded; times as long: {text}", flush=True)
    return {"step_ms": medians, "times_as_long_as_sharded": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--batch-size", type=int, default=2048, help="samples of each rank or worker in a step")
    parser.add_argument("--optimizers", nargs="*", default=["sgd", "adagrad"])
    parser.add_argument("--kinds", nargs="*", choices=("sharded", "sparse", "dense"), default=["sharded", "sparse"])
    parser.add_argument("--rate-mbit", type=float, help="on two hosts of the lab with links of this rate")
    parser.add_argument("--pairs", type=int, default=10, help="measurements in a job, of 8 steps each")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    path = HERE / "results" / "table_servers.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    rate = arguments.rate_mbit
    with Laboratory(RANKS, rate_mbit=rate, delay_ms=DELAY_MS) if rate else contextlib.nullcontext() as lab:
        for optimizer in arguments.optimizers:
            key = f"{arguments.rows} rows, batch {arguments.batch_size}, {optimizer}, "
            key += f"{rate:g} Mbit/s" if lab else "one host"
            results[key] = compare(arguments, optimizer, lab)
            path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
