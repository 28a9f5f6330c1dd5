"""How long an elastic job pauses when a rank is killed, and when another one joins.

    launch/run python benchmarks/elastic.py --ranks 3 --kills 20

Kills each rank in turn (SIGKILL) while the digits are trained, and waits until a new process has taken its place.
Prints the time from the kill to the end of the next step of any survivor, and the longest time between two steps while
a process joins: median, and the range of the middle half and of all. With ``--quiet-steps N`` it also compares steps of
an elastic job in which nothing happens with those of ``horovodrun --gloo``, in turn.
"""

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import keras

import hvdtrain
from hvdtrain.distributed import runtime
from hvdtrain.tasks import digits

TIMES = "ELASTIC_BENCHMARK_TIMES"


class StepTimes(keras.callbacks.Callback):
    """Notes when this rank has completed a step, and which rank it is."""

    def on_train_batch_end(self, batch, logs=None):
        with Path(os.environ[TIMES], f"{os.getpid()}").open("a") as file:
            file.write(f"{time.time()} {runtime.collectives().rank} {runtime.collectives().size}\n")


TASK = hvdtrain.Task(
    model=digits.make_model,
    data=digits.read_data,
    loss=digits.TASK.loss,
    callbacks=lambda: [StepTimes()],
    defaults={"learning_rate": 1e-4, "batch_size": 32, "log_every": 1000, "eval_every": 10**6},
)


def steps_in(folder: Path) -> dict[int, list[tuple[float, int, int]]]:
    """The steps of each process: when, as which rank, of how many."""
    found = {}
    for path in folder.iterdir():
        lines = [line.split() for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        found[int(path.name)] = [(float(at), int(rank), int(size)) for at, rank, size in lines]
    return found


def wait_for_size(folder: Path, size: int, since_s: float) -> dict[int, list[tuple[float, int, int]]]:
    """Waits until all ranks of a job of this size have made steps."""
    deadline_s = time.time() + 120
    while time.time() < deadline_s:
        steps = steps_in(folder)
        living = {pid for pid, each in steps.items() if each and each[-1][0] > since_s and each[-1][2] == size}
        if len(living) == size:
            return {pid: steps[pid] for pid in living}
        time.sleep(0.05)
    raise SystemExit(f"no job of {size} ranks within two minutes")


def measure(ranks: int, kills: int, run: Path) -> tuple[list[float], list[float]]:
    """Seconds from each kill to the next step, and of the pause of each join."""
    losses, joins = [], []
    times = run / "times"
    times.mkdir()
    line = [sys.executable, "-m", "hvdtrain", "elastic", f"1:{ranks}", sys.executable, "-m", "hvdtrain"]
    line += ["--task", __file__, "--run-dir", str(run / "run"), "--steps", "10000000", "--checkpoint-every", "0"]
    job = subprocess.Popen(line, env={**os.environ, TIMES: str(times)}, stdout=subprocess.DEVNULL)
    try:
        since_s = 0.0
        for rank in itertools.islice(itertools.cycle(range(ranks)), kills):
            steps = wait_for_size(times, ranks, since_s)
            time.sleep(1.0)
            victim = next(pid for pid, each in steps.items() if each[-1][1] == rank)
            killed_s = time.time()
            os.kill(victim, signal.SIGKILL)
            steps = wait_for_size(times, ranks, killed_s)
            survivors = [[at for at, _, _ in each] for pid, each in steps.items() if each[0][0] < killed_s]
            losses.append(min(min(at for at in each if at > killed_s) for each in survivors) - killed_s)
            after = [at for at in survivors[0] if at > killed_s]
            joins.append(max(later - earlier for earlier, later in itertools.pairwise(after)))
            since_s = time.time()
    finally:
        job.terminate()
        job.wait(60)
    return losses, joins


def text(seconds: list[float]) -> str:
    low, _, high = statistics.quantiles(seconds, n=4)
    return (
        f"{statistics.median(seconds):.2f} s ({low:.2f} to {high:.2f}, worst {max(seconds):.2f}, {len(seconds)} times)"
    )


def quiet_step_ms(launch: list[str], steps: int, run: Path) -> float:
    """The median step of a job in which nothing happens."""
    line = [*launch, sys.executable, "-m", "hvdtrain", "--run-dir", str(run), "--steps", str(steps)]
    subprocess.run(line, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return json.loads((run / "summary.json").read_text())["step_ms"]["p50"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--quiet-steps", type=int, default=0)
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.kills:
            losses, joins = measure(arguments.ranks, arguments.kills, Path(folder))
            print(f"{arguments.ranks} ranks, SIGKILL to the next step: {text(losses)}")
            print(f"{arguments.ranks} ranks, longest pause while a process joins: {text(joins)}")
        if arguments.quiet_steps:
            size = str(arguments.ranks)
            elastic = [sys.executable, "-m", "hvdtrain", "elastic", f"1:{size}"]
            ratios = []
            for turn in range(arguments.turns):
                each = [
                    quiet_step_ms(launch, arguments.quiet_steps, Path(folder, f"{turn}-{name}"))
                    for name, launch in (("elastic", elastic), ("gloo", ["horovodrun", "--gloo", "-np", size]))
                ]
                ratios.append(each[0] / each[1])
            print(f"{size} ranks, step of an elastic job over horovodrun --gloo: {statistics.median(ratios):.3f}")
            print(f"  ({min(ratios):.3f} to {max(ratios):.3f}, {len(ratios)} pairs of jobs)")


if __name__ == "__main__":
    main()
