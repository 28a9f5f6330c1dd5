"""Time to a given loss on a slow network: sync and local training over links of 100 Mbit/s and 20 ms.

    launch/run python benchmarks/slow_network.py        # as root, with Debian's iproute2 and openssh-server
    launch/run python benchmarks/slow_network.py --tasks cifar10 transformer --modes sync fragments,int4 --ranks 2
    launch/run python benchmarks/slow_network.py --tasks cifar10 --peaks --modes int4 fragments,int4 --ranks 2

Hosts are network namespaces of this machine with one rank each. Trains a task in each mode, interleaved: the digits
task, the CIFAR-10 network on generated images, or a character-level transformer on real text. Prints the time each mode
takes to reach the final loss of sync training: that of the steps alone, at their mean, and that of the run, with
compilation and evaluations, for which local training averages the whole model in single precision.
With ``--peaks``, also the most bytes that a host sends in any 100 ms, in runs without evaluations, between their first
log line and their last. The last results are in ``benchmarks/results/slow_network.json``; ``local_figure.py`` plots
those of the digits task.
"""

import argparse
import bisect
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
LAUNCH = HERE.parent / "launch"
sys.path.insert(0, str(LAUNCH / "lab"))
from laboratory import Laboratory
from run_results import summary_and_curve

LOCAL = ["--mode", "local", "--sync-every", "16"]
FRAGMENTS = ["--fragments", "4"]
INT4 = ["--sync-dtype", "int4"]
MODES = {
    "sync": [],
    "local": LOCAL,
    "overlap": [*LOCAL, "--overlap"],
    "wait-free": [*LOCAL, "--wait-free"],
    "overlap, int4": [*LOCAL, "--overlap", *INT4],
    "wait-free, int4": [*LOCAL, "--wait-free", *INT4],
    "overlap, fragments": [*LOCAL, "--overlap", *FRAGMENTS],
    "overlap, fragments, int4": [*LOCAL, "--overlap", *FRAGMENTS, *INT4],
    "wait-free, fragments, int4": [*LOCAL, "--wait-free", *FRAGMENTS, *INT4],
}


class Trained(NamedTuple):
    """A task, and how long it is trained."""

    options: list[str]
    steps: int
    """Of sync mode."""
    eval_every: int
    has_files: bool = False


TASKS = {
    "digits": Trained([], 230, 46),
    "cifar10": Trained(["--task", f"{HERE / 'learning_tasks.py'}:CIFAR10"], 100, 10, True),
    "transformer": Trained(["--task", f"{HERE / 'learning_tasks.py'}:TRANSFORMER"], 300, 20),
}
LONGER = 3
PEAK_S = 0.1
SAMPLED_S = 0.01


class SentBytes:
    """Samples how many bytes a host has sent."""

    def __init__(self, lab: Laboratory, host: str):
        self._counter = lab.path(host, "/sys/class/net/eth0/statistics/tx_bytes")
        self.samples: list[tuple[float, int]] = []

    @contextlib.contextmanager
    def sampled(self) -> Iterator[None]:
        """In the block, takes samples."""
        ended = threading.Event()

        def sample() -> None:
            while not ended.wait(SAMPLED_S):
                self.samples.append((time.time(), int(self._counter.read_text())))

        thread = threading.Thread(target=sample)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def peak(self, first_s: float, last_s: float) -> int:
        """The most bytes in any 100 ms between two times."""
        during = [each for each in self.samples if first_s <= each[0] <= last_s]
        times = [at for at, _ in during]
        ends = [bisect.bisect_right(times, at + PEAK_S) - 1 for at in times]
        return max(during[end][1] - sent for end, (_, sent) in zip(ends, during, strict=True))


def run(lab: Laboratory, task: str, data: Path, mode: str, options: list[str], run_dir: Path) -> None:
    trained = TASKS[task]
    files = ["--data-dir", str(data)] if trained.has_files else []
    train = [sys.executable, "-m", "hvdtrain", *trained.options, *files, *options, "--check-every", "0"]
    # One thread: the hosts of the lab share this machine's cores.
    train += ["--threads", "1", "--checkpoint-every", "0", "--run-dir", str(run_dir), *MODES[mode]]
    command = lab.command(lab.names[0], [sys.executable, str(LAUNCH / "mpirun.py"), "-H", lab.slots(), *train])
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode != 0:
        sys.exit(f"{mode} failed:\n{done.stdout}\n{done.stderr}")


def train(
    lab: Laboratory, task: str, data: Path, mode: str, batch_size: int, steps: int, every: int, run_dir: Path
) -> dict[str, Any]:
    """Trains; returns the evaluations (seconds since the first step, loss), bytes sent and facts of the summary."""
    sent = lab.bytes_sent(lab.names[0])
    options = ["--steps", str(steps), "--eval-every", str(every), "--log-every", "1000"]
    options += ["--batch-size", str(batch_size)]
    run(lab, task, data, mode, options, run_dir)
    summary, curve = summary_and_curve(run_dir)
    events = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {
        "curve": curve,
        "steps": [event["step"] for event in events if event["event"] == "eval"],
        "step_s": batch_size * len(lab.names) / summary["examples_per_second"],
        "bytes_sent_per_step": (lab.bytes_sent(lab.names[0]) - sent) / steps,
        "hidden_share": summary.get("average_hidden_share"),
        "late_steps": summary.get("average_late_steps"),
        "samples": summary["samples"],
    }


def peak_of(
    lab: Laboratory, task: str, data: Path, mode: str, batch_size: int, steps: int, run_dir: Path
) -> dict[str, int]:
    """Trains without evaluations; returns the most bytes in any 100 ms, and in an average."""
    sent = SentBytes(lab, lab.names[0])
    options = ["--steps", str(steps), "--eval-every", "1000000", "--log-every", "16", "--batch-size", str(batch_size)]
    with sent.sampled():
        run(lab, task, data, mode, options, run_dir)
    events = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    times = [event["time"] for event in events if event["event"] == "train"]
    summary = json.loads((run_dir / "summary.json").read_text())
    # The last line is that of the end.
    return {"peak_bytes": sent.peak(times[0], times[-2]), "average_bytes_max": summary.get("average_bytes_max", 0)}


def times_to(loss: float, run: dict[str, Any]) -> tuple[float, float] | None:
    """Seconds until a run reaches a loss: of its steps alone, and of the run."""
    found = zip(run["curve"], run["steps"], strict=True)
    return next(((step * run["step_s"], seconds) for (seconds, value), step in found if value <= loss), None)


def measure(lab: Laboratory, task: str, data: Path, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in arguments.modes}
    steps = arguments.steps or TASKS[task].steps
    every = arguments.eval_every or max(1, TASKS[task].eval_every * steps // TASKS[task].steps)
    for repeat in range(arguments.repeats):
        for mode in arguments.modes:
            # Local training needs more steps to reach the same loss, and makes them faster.
            length = steps if mode == "sync" else LONGER * steps
            run_dir = folder / f"{mode}-{repeat}"
            runs[mode].append(train(lab, task, data, mode, arguments.batch_size, length, every, run_dir))
    return runs


def report(key: str, runs: dict[str, list[dict[str, Any]]]) -> None:
    for mode, each in runs.items():
        ratios: list[list[float]] = []
        for run, sync in zip(each, runs["sync"], strict=True):
            goal = sync["curve"][-1][1]
            ours, theirs = times_to(goal, run), times_to(goal, sync)
            assert theirs is not None
            ratios += [] if ours is None else [[one / other for one, other in zip(theirs, ours, strict=True)]]
        text = " and ".join(
            f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"
            for found in zip(*ratios, strict=True)
        )
        hidden = statistics.median(run["hidden_share"] or 0 for run in each)
        sent = statistics.median(run["bytes_sent_per_step"] for run in each)
        step_ms = 1000 * statistics.median(run["step_s"] for run in each)
        print(
            f"{key}, {mode}: steps and run {text or 'never'} times as fast as sync to its final loss, reached in "
            f"{len(ratios)} of {len(each)} runs; {step_ms:.0f} ms and {sent:.0f} bytes sent per step, "
            f"{100 * hidden:.0f} % of the averaging overlapped",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["digits"])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["sync", "local", "overlap", "wait-free"])
    parser.add_argument("--rate-mbit", type=float, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="of a rank")
    parser.add_argument("--steps", type=int, help="of sync mode (default: by task)")
    parser.add_argument("--eval-every", type=int, help="default: by task")
    parser.add_argument("--peaks", action="store_true", help="only the peaks of bytes")
    arguments = parser.parse_args()
    path = HERE / "results" / "slow_network.json"
    # Those of other settings are kept.
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for ranks in arguments.ranks:
        with (
            Laboratory(ranks, rate_mbit=arguments.rate_mbit, delay_ms=10) as lab,
            tempfile.TemporaryDirectory() as name,
        ):
            folder = Path(name)
            for task in arguments.tasks:
                key = f"{task}, {ranks} ranks, batch {arguments.batch_size}, {arguments.rate_mbit:g} Mbit/s"
                data = folder / f"{task}-data"
                if TASKS[task].has_files:
                    make = [sys.executable, "-m", "hvdtrain", *TASKS[task].options[:2], "--make-sample-data", str(data)]
                    subprocess.run(make, check=True, capture_output=True)
                if arguments.peaks:
                    for mode in arguments.modes:
                        run_dir = folder / f"{task}-{mode}-peak"
                        found = peak_of(lab, task, data, mode, arguments.batch_size, arguments.steps or 96, run_dir)
                        results.setdefault(f"{key}, peaks", {})[mode] = found
                        print(f"{key}, {mode}: {found}", flush=True)
                else:
                    results[key] = measure(lab, task, data, folder / task, arguments)
                    report(key, results[key])
                path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
