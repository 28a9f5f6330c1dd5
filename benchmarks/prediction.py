"""Predictions of bench compared with measurements, on lab networks.

    launch/run python benchmarks/prediction.py        # as root, with Debian's iproute2 and openssh-server
    launch/run python benchmarks/prediction.py --mbit 40 --hosts 6 8    # these cases; keeps the results of the others

For each network, two hosts that train a model of 1 MB determine the link; one process measures the step times of a
larger model and when its gradients are ready. From these, steps on more hosts with larger models are predicted, in sync
and local mode, and then measured: the cases below, chosen before any was run. Prints the error of each case, the median
and the 95th percentile, and saves them to results/prediction.json.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
LAUNCH = HERE.parent / "launch"
sys.path.insert(0, str(LAUNCH / "lab"))
from laboratory import Laboratory

# Mbit/s and one-way delay in ms. Not faster, because four hosts and the process that forwards their packets share the
# cores of one machine: on two cores, throughput fell with the number of hosts at 100 Mbit/s (MPI_Allreduce of 16 MiB on
# 2, 3 and 4 hosts: 93, 79 and 76 Mbit/s) but not at 20 Mbit/s (17 to 18).
NETWORKS = ((20, 5), (25, 20), (40, 2))
# Hosts and model, for each network and both modes.
HELD_OUT = ((2, "MB8"), (3, "MB4"), (4, "MB4"), (6, "MB4"), (8, "MB4"))
MAX_BUSY_HOSTS = 4
EVERY = 4
OPTIONS = ["--blocks", "4", "--block-seconds", "0.1", "--max-spread", "1", "--sync-every", str(EVERY)]


def bench(launcher: list[str], task: str, *more: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "hvdtrain", "bench", "--task", f"{HERE / 'wide_tasks.py'}:{task}", *OPTIONS]
        line = [*launcher, *command, "--threads", "1", "--output", folder, *more]
        done = subprocess.run(line, capture_output=True, text=True, timeout=1800, check=False)
        if done.returncode != 0:
            sys.exit(f"{' '.join(line)} failed:\n{done.stdout}\n{done.stderr}")
        return json.loads((Path(folder) / "bench.json").read_text())


def on_hosts(hosts: int, rate_mbit: float, delay_ms: float, task: str, *more: str) -> dict[str, Any]:
    # On two cores, six ranks that poll without pause had not ended after seven minutes.
    yielding = ["env", "OMPI_MCA_mpi_yield_when_idle=1"] if hosts > MAX_BUSY_HOSTS else []
    with Laboratory(hosts, rate_mbit=rate_mbit, delay_ms=delay_ms) as lab:
        return bench(lab.command("lab1", [*yielding, str(LAUNCH / "mpirun.sh"), "-H", lab.slots()]), task, *more)


def main() -> None:
    rates = [rate_mbit for rate_mbit, _ in NETWORKS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, nargs="*", default=rates, choices=rates)
    num_hosts = sorted({hosts for hosts, _ in HELD_OUT})
    parser.add_argument("--hosts", type=int, nargs="*", default=num_hosts, choices=num_hosts)
    chosen = parser.parse_args()
    kept = HERE / "results" / "prediction.json"
    before = json.loads(kept.read_text()) if kept.exists() else []
    rows = [row for row in before if row["mbit"] not in chosen.mbit or row["hosts"] not in chosen.hosts]
    for rate_mbit, delay_ms in [network for network in NETWORKS if network[0] in chosen.mbit]:
        link = on_hosts(2, rate_mbit, delay_ms, "MB1", "--predict", "2")["prediction"]["links"]["between"]
        given = ["--link-mbit", str(link["bits_per_second"] / 1e6), "--link-latency-ms", str(1000 * link["latency_s"])]
        for hosts, task in [case for case in HELD_OUT if case[0] in chosen.hosts]:
            asked = ["--predict", str(hosts), "--ranks-per-host", "1", *given]
            predicted = {row["mode"]: row["step_ms"] for row in bench([], task, *asked)["prediction"]["rows"]}
            measured = on_hosts(hosts, rate_mbit, delay_ms, task)["cases"]
            for mode in ("sync", "local"):
                took_ms = measured[mode]["step_ms"]
                error = predicted[mode] / took_ms - 1
                case = {"mbit": rate_mbit, "delay_ms": delay_ms, "hosts": hosts, "model": task, "mode": mode}
                rows.append({**case, "predicted_ms": predicted[mode], "measured_ms": took_ms, "error": error})
                result = f"predicted {predicted[mode]:.1f} ms, measured {took_ms:.1f} ms, {error:+.1%}"
                print(f"{rate_mbit} Mbit/s, {delay_ms} ms, {hosts} hosts, {task}, {mode}: {result}", flush=True)
            # Each case takes minutes: save partial results in case the run is interrupted.
            kept.write_text(json.dumps(rows, indent=1) + "\n")
    errors = [abs(row["error"]) for row in rows]
    print(f"{len(rows)} cases: median {statistics.median(errors):.1%}, 95th percentile {np.percentile(errors, 95):.1%}")


if __name__ == "__main__":
    main()
