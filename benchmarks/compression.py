"""Compressed gradients on slow networks: steps per second, bytes, time to a loss, accuracy.

    launch/run python benchmarks/compression.py speed      # as root, with Debian's iproute2 and openssh-server
    launch/run python benchmarks/compression.py accuracy

``speed``: hosts are network namespaces of this machine with one rank each, over links with a given rate and 0.5 ms of
delay. Trains the CIFAR-10 network and a text classifier (20,000 words, its embedding reduced as a dense tensor), on
generated samples, with each compression in turn. Prints steps per second and bytes, and the time to the final loss of
the uncompressed run, relative to that run. ``accuracy``: final accuracy on real digits, with several seeds.
The last results are in ``benchmarks/results/compression.json``.
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
from run_results import summary_and_curve

COMPRESSIONS = {
    "none": [],
    "fp16": ["--compression", "fp16"],
    "powersgd:4": ["--compression", "powersgd:4"],
}
TASKS = {
    "cifar10": ["--learning-rate", "0.05", "--checkpoint-every", "100000", "--histograms-every", "0"],
    str(HERE / "compression_tasks.py:TEXT"): ["--sparse-as-dense"],
}
DELAY_MS = 0.5
LONGER = 2
"""Compressed runs may need more steps to the same loss."""


def train(command: list[str], run_dir: Path) -> dict[str, Any]:
    """Trains; returns the evaluations (seconds since the first step, loss) and facts of the summary."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode != 0:
        sys.exit(f"failed: {' '.join(command)}\n{done.stdout}\n{done.stderr}")
    summary, curve = summary_and_curve(run_dir)
    return {
        "curve": curve,
        "step_ms": summary["step_ms"]["p50"],
        "bytes_reduced_per_step": summary["bytes_reduced"] / summary["steps"],
        "accuracy": summary["eval"].get("accuracy"),
    }


def command_of(task: str, compression: str, steps: int, run_dir: Path, *more: str) -> list[str]:
    length = ["--steps", str(steps), "--eval-every", str(max(1, steps // 20)), "--log-every", "1000"]
    length += ["--check-every", "0"]
    # One thread: the hosts of the lab share this machine's cores.
    options = [*length, *COMPRESSIONS[compression], *more, "--threads", "1", "--run-dir", str(run_dir)]
    return [sys.executable, "-m", "hvdtrain", "--task", task, *options]


def speed(
    rates_mbit: list[int], tasks: list[str], ranks: int, repeats: int, steps: int, batch_size: int
) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for rate in rates_mbit:
        for task in tasks:
            runs: dict[str, list[dict[str, Any]]] = {name: [] for name in COMPRESSIONS}
            with Laboratory(ranks, rate_mbit=rate, delay_ms=DELAY_MS) as lab, tempfile.TemporaryDirectory() as folder:
                data = Path(folder) / "data"
                make = [sys.executable, "-m", "hvdtrain", "--task", task, "--make-sample-data", str(data)]
                subprocess.run(make, check=True, capture_output=True)
                for repeat in range(repeats):
                    for name, found in runs.items():
                        run_dir = Path(folder) / f"{name}-{repeat}"
                        options = [*TASKS[task], "--data-dir", str(data), "--seed", str(repeat)]
                        options += ["--batch-size", str(batch_size)]
                        num_steps = steps if name == "none" else LONGER * steps
                        line = command_of(task, name, num_steps, run_dir, *options)
                        sent = lab.bytes_sent(lab.names[0])
                        launch = [str(LAUNCH / "mpirun.sh"), "-H", lab.slots(), *line]
                        found.append(train(lab.command(lab.names[0], launch), run_dir))
                        found[-1]["bytes_sent_per_step"] = (lab.bytes_sent(lab.names[0]) - sent) / num_steps
            key = f"{Path(task).name}, {ranks} ranks, batch {batch_size}, {rate} Mbit/s"
            results[key] = runs
            report(key, runs)
    return results


def report(key: str, runs: dict[str, list[dict[str, Any]]]) -> None:
    goals = [run["curve"][-1] for run in runs["none"]]
    for name, found in runs.items():
        pairs = list(zip(runs["none"], found, strict=True))
        faster = [plain["step_ms"] / run["step_ms"] for plain, run in pairs]
        fewer = [plain["bytes_reduced_per_step"] / run["bytes_reduced_per_step"] for plain, run in pairs]
        on_wire = [plain["bytes_sent_per_step"] / run["bytes_sent_per_step"] for plain, run in pairs]
        times = [
            seconds / reached
            for (seconds, goal), run in zip(goals, found, strict=True)
            if (reached := next((at for at, loss in run["curve"] if loss <= goal), None)) is not None
        ]
        to_loss = f"{statistics.median(times):.2f}x as fast to the loss" if times else "never at the loss"
        step_ms = statistics.median(run["step_ms"] for run in found)
        print(
            f"{key}, {name}: {step_ms:.1f} ms per step, {statistics.median(faster):.2f} ({min(faster):.2f} to "
            f"{max(faster):.2f}) times as many steps/s, 1/{statistics.median(fewer):.1f} of the bytes (1/"
            f"{statistics.median(on_wire):.1f} on the wire), {to_loss} in {len(times)} of {len(found)} runs",
            flush=True,
        )


def accuracy(seeds: int, steps: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in COMPRESSIONS}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(seeds):
            for name, values in found.items():
                run_dir = Path(folder) / f"{name}-{seed}"
                line = command_of("digits", name, steps, run_dir, "--seed", str(seed))
                launch = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", *line]
                values.append(train(launch, run_dir)["accuracy"])
    for name, values in found.items():
        print(f"digits, {name}: accuracy {np.mean(values):.4f}, sigma {np.std(values, ddof=1):.4f}, {seeds} seeds")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "accuracy"])
    parser.add_argument("--rates-mbit", type=int, nargs="*", default=[100, 1000])
    parser.add_argument("--tasks", nargs="*", choices=["cifar10", "text"], default=["cifar10", "text"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8, help="samples of each rank in a step")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.what == "accuracy":
        found: dict[str, Any] = {"accuracy": accuracy(arguments.seeds, arguments.steps)}
    else:
        tasks = [task for task in TASKS if Path(task).name.lower().rpartition(":")[2] in arguments.tasks]
        found = speed(
            arguments.rates_mbit, tasks, arguments.ranks, arguments.repeats, arguments.steps, arguments.batch_size
        )
    path = HERE / "results" / "compression.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**kept, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
