"""Time to a loss on a slow network: sync and local training over links of 100 Mbit/s and 20 ms.

    launch/run python benchmarks/slow_network.py        # as root, with Debian's iproute2 and openssh-server

Hosts are network namespaces of this machine, a rank on each. Trains the digits each way in turn, again and again, and
evaluates every 46 steps, which takes time too. Prints how long each takes to come to the loss that sync training has in
the end. The last results are kept in ``benchmarks/results/slow_network.json``, and drawn by ``local_figure.py``.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

LAUNCH = Path(__file__).resolve().parents[1] / "launch"
sys.path.insert(0, str(LAUNCH / "lab"))
from laboratory import Laboratory

WAYS = {
    "sync": [],
    "local": ["--mode", "local", "--average-every", "16"],
    "overlap": ["--mode", "local", "--average-every", "16", "--overlap"],
    "wait-free": ["--mode", "local", "--average-every", "16", "--wait-free"],
}
LONGER = 3


def train(lab: Laboratory, way: str, steps: int, run_dir: Path) -> dict[str, Any]:
    """The evaluations of a run, each as seconds since the first step and loss; what was sent; and its summary."""
    options = ["--steps", str(steps), "--eval-every", "46", "--log-every", "1000", "--check-every", "0"]
    train = [sys.executable, "-m", "hvdtrain", *options, "--run-dir", str(run_dir), *WAYS[way]]
    command = lab.command(lab.names[0], [str(LAUNCH / "mpirun.sh"), "-H", lab.slots(), *train])
    sent = lab.bytes_sent(lab.names[0])
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode != 0:
        sys.exit(f"{way} failed:\n{done.stdout}\n{done.stderr}")
    events = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    evaluations = [event for event in events if event["event"] == "eval"]
    summary = json.loads((run_dir / "summary.json").read_text())
    began_s = evaluations[-1]["time"] - summary["wall_seconds"]
    return {
        "curve": [[event["time"] - began_s, event["loss"]] for event in evaluations],
        "bytes_sent_per_step": (lab.bytes_sent(lab.names[0]) - sent) / steps,
        "hidden_share": summary.get("average_hidden_share"),
        "late_steps": summary.get("average_late_steps"),
        "samples": summary["samples"],
    }


def seconds_to(loss: float, curve: list[list[float]]) -> float | None:
    return next((seconds for seconds, value in curve if value <= loss), None)


def measure(ranks: int, repeats: int, steps: int) -> dict[str, list[dict[str, Any]]]:
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    with Laboratory(ranks, rate_mbit=100, delay_ms=10) as lab, tempfile.TemporaryDirectory() as folder:
        for repeat in range(repeats):
            for way in WAYS:
                # Local training needs more steps to the same loss, and has the time for them.
                length = steps if way == "sync" else LONGER * steps
                runs[way].append(train(lab, way, length, Path(folder) / f"{way}-{repeat}"))
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=230)
    arguments = parser.parse_args()
    results = {}
    for ranks in arguments.ranks:
        runs = results[str(ranks)] = measure(ranks, arguments.repeats, arguments.steps)
        goals = [run["curve"][-1][1] for run in runs["sync"]]
        for way, each in runs.items():
            times = [seconds_to(goal, run["curve"]) for goal, run in zip(goals, each, strict=True)]
            ratios = [
                runs["sync"][i]["curve"][-1][0] / seconds for i, seconds in enumerate(times) if seconds is not None
            ]
            text = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else "never"
            hidden = statistics.median(run["hidden_share"] or 0 for run in each)
            sent = statistics.median(run["bytes_sent_per_step"] for run in each)
            print(
                f"{ranks} ranks, {way}: {text} times as fast as sync to its loss, in {len(ratios)} of {len(each)} "
                f"runs; {sent:.0f} bytes sent a step, {100 * hidden:.0f} % of the averaging hidden",
                flush=True,
            )
    path = Path(__file__).parent / "results" / "slow_network.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
