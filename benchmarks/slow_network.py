"""Time to a given loss on a slow network: sync and local training over links of 100 Mbit/s and 20 ms.

    launch/run python benchmarks/slow_network.py        # as root, with Debian's iproute2 and openssh-server

Hosts are network namespaces of this machine with one rank each. Trains the digits task in each mode, interleaved, with
an evaluation every 46 steps, which is included in the time. Prints the time each mode takes to reach the final loss of
sync training. The last results are in ``benchmarks/results/slow_network.json``; ``local_figure.py`` plots them.
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
from run_results import summary_and_curve

MODES = {
    "sync": [],
    "local": ["--mode", "local", "--sync-every", "16"],
    "overlap": ["--mode", "local", "--sync-every", "16", "--overlap"],
    "wait-free": ["--mode", "local", "--sync-every", "16", "--wait-free"],
}
LONGER = 3


def train(lab: Laboratory, mode: str, steps: int, run_dir: Path) -> dict[str, Any]:
    """Trains; returns the evaluations (seconds since the first step, loss), bytes sent and facts of the summary."""
    options = ["--steps", str(steps), "--eval-every", "46", "--log-every", "1000", "--check-every", "0"]
    train = [sys.executable, "-m", "hvdtrain", *options, "--run-dir", str(run_dir), *MODES[mode]]
    command = lab.command(lab.names[0], [str(LAUNCH / "mpirun.sh"), "-H", lab.slots(), *train])
    sent = lab.bytes_sent(lab.names[0])
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode != 0:
        sys.exit(f"{mode} failed:\n{done.stdout}\n{done.stderr}")
    summary, curve = summary_and_curve(run_dir)
    return {
        "curve": curve,
        "bytes_sent_per_step": (lab.bytes_sent(lab.names[0]) - sent) / steps,
        "hidden_share": summary.get("average_hidden_share"),
        "late_steps": summary.get("average_late_steps"),
        "samples": summary["samples"],
    }


def seconds_to(loss: float, curve: list[list[float]]) -> float | None:
    return next((seconds for seconds, value in curve if value <= loss), None)


def measure(ranks: int, repeats: int, steps: int) -> dict[str, list[dict[str, Any]]]:
    runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    with Laboratory(ranks, rate_mbit=100, delay_ms=10) as lab, tempfile.TemporaryDirectory() as folder:
        for repeat in range(repeats):
            for mode in MODES:
                # Local training needs more steps to reach the same loss, and makes them faster.
                length = steps if mode == "sync" else LONGER * steps
                runs[mode].append(train(lab, mode, length, Path(folder) / f"{mode}-{repeat}"))
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
        for mode, each in runs.items():
            times = [seconds_to(goal, run["curve"]) for goal, run in zip(goals, each, strict=True)]
            ratios = [
                runs["sync"][i]["curve"][-1][0] / seconds for i, seconds in enumerate(times) if seconds is not None
            ]
            text = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else "never"
            hidden = statistics.median(run["hidden_share"] or 0 for run in each)
            sent = statistics.median(run["bytes_sent_per_step"] for run in each)
            print(
                f"{ranks} ranks, {mode}: {text}x as fast as sync to its final loss, reached in {len(ratios)} of "
                f"{len(each)} runs; {sent:.0f} bytes sent per step, {100 * hidden:.0f} % of the averaging overlapped",
                flush=True,
            )
    path = Path(__file__).parent / "results" / "slow_network.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
