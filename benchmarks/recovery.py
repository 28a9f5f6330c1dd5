"""Recovery time: how long a job takes to end after a rank is killed, and to resume after a restart.

    launch/run python benchmarks/recovery.py

Trains the digits on two ranks under mpirun, kills rank 1, and restarts the job. Prints the seconds from the
kill to the end of the last process, from the restart to the first step and, for comparison, from the first
start to the first step.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "parallel"))
from launcher import Job

STEPS, KILLED_AFTER, CHECKPOINT_EVERY = 2000, 500, 100


def start(run_dir: Path) -> Job:
    options = ["--steps", STEPS, "--checkpoint-every", CHECKPOINT_EVERY, "--log-every", 1, "--run-dir", run_dir]
    return Job([sys.executable, "-m", "hvdtrain", *map(str, options)], ranks=2)


def wait_for(condition: Callable[[], bool]) -> float:
    """Waits until a condition holds and returns the time."""
    while not condition():
        # Poll rarely: the job should have all processor time.
        time.sleep(0.1)
    return time.time()


def steps_logged(run_dir: Path, since_s: float) -> list[int]:
    """The training steps logged since a point in time."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    events = [json.loads(line) for line in lines if line.endswith("}")]
    return [event["step"] for event in events if event["event"] == "train" and event["time"] > since_s]


def measure(run_dir: Path) -> dict[str, float]:
    seconds = {}
    began_s = time.time()
    job = start(run_dir)
    seconds["start to first step"] = wait_for(lambda: bool(steps_logged(run_dir, began_s))) - began_s
    wait_for(lambda: max(steps_logged(run_dir, began_s)) >= KILLED_AFTER)
    victim = job.rank(1)
    killed_s = time.time()
    os.kill(victim, signal.SIGKILL)
    seconds["kill to end"] = wait_for(lambda: not job.processes()) - killed_s
    job.end(10)
    restarted_s = time.time()
    job = start(run_dir)
    seconds["restart to first step"] = wait_for(lambda: bool(steps_logged(run_dir, restarted_s))) - restarted_s
    job.kill()
    job.end(10)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as folder:
        measured = [measure(Path(folder) / str(i)) for i in range(repeats)]
    for name in measured[0]:
        values = [each[name] for each in measured]
        print(
            f"{name}: {statistics.median(values):.2f} s ({min(values):.2f} to {max(values):.2f}, {repeats} repetitions)"
        )


if __name__ == "__main__":
    main()
