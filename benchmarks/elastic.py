"""How long an elastic job pauses when a rank is killed, and when another one joins.

    launch/run python benchmarks/elastic.py --ranks 3 --kills 20
    launch/run python benchmarks/elastic.py --ranks 3 --kills 0 --horovod-kills 4
    launch/run python benchmarks/elastic.py --ranks 3 --kills 0 --goodput-seconds 120 --kill-every 20

Kills each rank in turn (SIGKILL) while the digits are trained, and waits until a new process has taken its place.
Prints the time from the kill to the end of the next step of any survivor, and the longest time between two steps while
a process joins: median, and the range of the middle half and of all.

* ``--lab`` (root needed) has the last rank on a second host of launch/lab; ``--cuts N`` cuts that host off, N times.
* ``--quiet-steps N`` compares steps of an elastic job in which nothing happens with those of ``horovodrun --gloo``.
* ``--horovod-kills N`` kills a rank of Horovod's own elastic mode, in N jobs.
* ``--goodput-seconds S`` kills a random rank every ``--kill-every`` seconds and prints the samples a second, as a share
  of those that as many members would train on undisturbed, beside ``launch/run --restarts``; a sleep stands for the
  computation of each sample.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import keras

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "launch" / "lab"))

from laboratory import Laboratory

import hvdtrain
from hvdtrain.distributed import runtime
from hvdtrain.tasks import digits

TIMES, SAMPLE_S = "ELASTIC_BENCHMARK_TIMES", "ELASTIC_BENCHMARK_SAMPLE_S"
GLOBAL_BATCH_SIZE = 96
CUT_STALL_TIMEOUT_S = 10


class StepTimes(keras.callbacks.Callback):
    """Notes when this rank has completed a step, and which rank it is."""

    def on_train_batch_begin(self, batch, logs=None):
        # A rank's part of the global batch.
        time.sleep(float(os.environ.get(SAMPLE_S, "0")) * GLOBAL_BATCH_SIZE / runtime.collectives().size)

    def on_train_batch_end(self, batch, logs=None):
        with Path(os.environ[TIMES], f"{os.getpid()}").open("a") as file:
            file.write(f"{time.time()} {runtime.collectives().rank} {runtime.collectives().size}\n")


TASK = hvdtrain.Task(
    model=digits.make_model,
    data=digits.read_data,
    loss=digits.TASK.loss,
    callbacks=lambda: [StepTimes()],
    defaults={"learning_rate": 1e-4, "batch_size": 32, "log_every": 10, "eval_every": 10**6},
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


def train_line(run: Path, *options: str) -> list[str]:
    line = [sys.executable, "-m", "hvdtrain", "--task", __file__, "--run-dir", str(run), "--steps", "10000000"]
    return [*line, "--global-batch-size", str(GLOBAL_BATCH_SIZE), *options]


def elastic_line(ranks: int, run: Path, lab: Laboratory | None = None, *options: str) -> list[str]:
    elastic = [sys.executable, "-m", "hvdtrain", "elastic", f"1:{ranks}"]
    train = train_line(run, "--checkpoint-every", "0", *options)
    if not lab:
        return [*elastic, *train]
    return lab.command("lab1", [*elastic, "--hosts", f"lab1:{ranks - 1},lab2:1", "--env", TIMES, *train])


def horovod_line(ranks: int, folder: Path) -> list[str]:
    """Horovod's own elastic mode, each rank under another host name: the host of a killed rank is excluded."""
    names = ["localhost", "127.0.0.1", socket.gethostname()]
    if ranks > len(names):
        raise SystemExit(f"--horovod-kills needs at most {len(names)} ranks, one for each name of this host")
    script = folder / "hosts.sh"
    script.write_text("\n".join(["#!/bin/sh", *(f"echo {name}:1" for name in names[:ranks])]) + "\n")
    script.chmod(0o755)
    launch = ["horovodrun", "--gloo", "-np", str(ranks), "--min-np", "1", "--max-np", str(ranks)]
    launch += ["--network-interface", "lo"]
    launch += ["--host-discovery-script", str(script), "--blacklist-cooldown-range", "1", "2"]
    return [*launch, sys.executable, str(Path(__file__).with_name("horovod_elastic.py"))]


def measure(line: list[str], ranks: int, kills: int, run: Path) -> tuple[list[float], list[float]]:
    """Seconds from each kill to the next step, and of the pause of each join."""
    losses, joins = [], []
    times = run / "times"
    times.mkdir()
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


def measure_cuts(ranks: int, cuts: int, folder: Path, lab: Laboratory) -> list[float]:
    """Seconds from each cut of the second host's link to the next step on the first host."""
    losses = []
    for number in range(cuts):
        times = folder / f"times-{number}"
        times.mkdir(parents=True)
        line = elastic_line(ranks, folder / f"run-{number}", lab, "--stall-timeout", str(CUT_STALL_TIMEOUT_S))
        job = subprocess.Popen(line, env={**os.environ, TIMES: str(times)}, stdout=subprocess.DEVNULL)
        try:
            wait_for_size(times, ranks, 0.0)
            time.sleep(1.0)
            cut_s = time.time()
            lab.cut("lab2")
            steps = wait_for_size(times, ranks - 1, cut_s + 0.5)
            losses.append(min(at for each in steps.values() for at, _, size in each if size < ranks) - cut_s)
        finally:
            lab.restore("lab2")
            job.terminate()
            job.wait(60)
    return losses


def measure_horovod(ranks: int, kills: int, folder: Path) -> list[float]:
    """Seconds from a kill to the next step of any survivor, in a job for each kill; infinity: none in two minutes."""
    losses = []
    for number in range(kills):
        times = folder / f"times-{number}"
        times.mkdir(parents=True)
        env = {**os.environ, TIMES: str(times), "TF_CPP_MIN_LOG_LEVEL": "2"}
        line = horovod_line(ranks, folder)
        job = subprocess.Popen(line, env=env, stdout=subprocess.DEVNULL, start_new_session=True)
        try:
            steps = wait_for_size(times, ranks, 0.0)
            time.sleep(1.0)
            victim = next(pid for pid, each in steps.items() if each[-1][1] == number % ranks)
            killed_s = time.time()
            os.kill(victim, signal.SIGKILL)
            after: list[float] = []
            while not after and time.time() < killed_s + 120:
                time.sleep(0.05)
                steps = steps_in(times)
                steps.pop(victim)
                # A step that was under way may still end.
                after = [at for each in steps.values() for at, _, size in each if at > killed_s and size != ranks]
            losses.append(min(after, default=math.inf) - killed_s)
        finally:
            os.killpg(job.pid, signal.SIGKILL)
            for pid in steps_in(times):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    return losses


def train_with_kills(line: list[str], times: Path, seconds: float, every_s: float | None) -> tuple[float, int]:
    """Trains for some seconds after its first step; returns the seconds and the number of kills."""
    times.mkdir(parents=True)
    env = {**os.environ, TIMES: str(times), SAMPLE_S: "0.0015"}
    job = subprocess.Popen(line, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    chosen = random.Random(1)
    kills = 0
    try:
        while not any(steps_in(times).values()):
            time.sleep(0.05)
        start_s = time.time()
        next_s = start_s + (every_s or seconds)
        while (now_s := time.time()) < start_s + seconds:
            if every_s and now_s >= next_s:
                living = [pid for pid, each in steps_in(times).items() if each and each[-1][0] > now_s - 5]
                if living:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(chosen.choice(living), signal.SIGKILL)
                    kills += 1
                next_s += every_s
            time.sleep(0.05)
        return time.time() - start_s, kills
    finally:
        job.terminate()
        job.wait(90)


def steps_of_rank_0(times: Path) -> list[tuple[float, int]]:
    """When each step was completed, by how many ranks."""
    return sorted((at, size) for each in steps_in(times).values() for at, rank, size in each if rank == 0)


def goodput(ranks: int, seconds: float, every_s: float, folder: Path) -> None:
    train_with_kills(elastic_line(ranks, folder / "quiet"), folder / "quiet-times", 20, None)
    quiet = steps_of_rank_0(folder / "quiet-times")[20:]
    samples_per_member_s = (len(quiet) - 1) * GLOBAL_BATCH_SIZE / (quiet[-1][0] - quiet[0][0]) / ranks
    _, kills = train_with_kills(elastic_line(ranks, folder / "run"), folder / "times", seconds, every_s)
    steps = steps_of_rank_0(folder / "times")
    member_s = sum(size * (at - before) for (before, _), (at, size) in itertools.pairwise(steps))
    share = (len(steps) - 1) * GLOBAL_BATCH_SIZE / member_s / samples_per_member_s
    print(f"elastic, a kill every {every_s:g} s ({kills} kills): {share:.3f} of the samples of its members undisturbed")
    restarts = ["launch/run", "--restarts", "100", "horovodrun", "--gloo", "-np", str(ranks)]
    line = [*restarts, *train_line(folder / "restarted", "--checkpoint-every", "50")]
    taken_s, kills = train_with_kills(line, folder / "restarted-times", seconds, every_s)
    log = (folder / "restarted" / "metrics.jsonl").read_text().splitlines()
    last = max(json.loads(each).get("step", 0) for each in log)
    share = last * GLOBAL_BATCH_SIZE / (taken_s * ranks) / samples_per_member_s
    print(f"--restarts, a kill every {every_s:g} s ({kills} kills), a checkpoint every 50 steps: {share:.3f}")


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
    parser.add_argument(
        "--on-unequal", default="stop", help="ignore: without the check of the first step after a change"
    )
    parser.add_argument("--lab", action="store_true", help="on two hosts of launch/lab")
    parser.add_argument("--cuts", type=int, default=0)
    parser.add_argument("--quiet-steps", type=int, default=0)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--horovod-kills", type=int, default=0)
    parser.add_argument("--goodput-seconds", type=float, default=0)
    parser.add_argument("--kill-every", type=float, default=20)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        lab = stack.enter_context(Laboratory(2)) if arguments.lab or arguments.cuts else None
        if arguments.kills:
            losses: list[float] = []
            joins: list[float] = []
            while len(losses) < arguments.kills:
                # Jobs with few kills: each time that it dies, a process is started again after a longer pause.
                job = Path(folder, str(len(losses)))
                job.mkdir()
                kills = min(2 * arguments.ranks, arguments.kills - len(losses))
                line = elastic_line(arguments.ranks, job / "run", lab, "--on-unequal", arguments.on_unequal)
                found = measure(line, arguments.ranks, kills, job)
                losses, joins = losses + found[0], joins + found[1]
            print(f"{arguments.ranks} ranks, SIGKILL to the next step: {text(losses)}")
            print(f"{arguments.ranks} ranks, longest pause while a process joins: {text(joins)}")
        if arguments.cuts and lab:
            losses = measure_cuts(arguments.ranks, arguments.cuts, Path(folder, "cuts"), lab)
            print(f"a host cut off, stall timeout {CUT_STALL_TIMEOUT_S} s, to the next step: {text(losses)}")
        if arguments.horovod_kills:
            losses = measure_horovod(arguments.ranks, arguments.horovod_kills, Path(folder, "horovod"))
            each = ", ".join(f"{seconds:.1f}" for seconds in losses)
            print(f"Horovod's elastic mode, {arguments.ranks} ranks, SIGKILL to the next step, s: {each}")
        if arguments.goodput_seconds:
            goodput(arguments.ranks, arguments.goodput_seconds, arguments.kill_every, Path(folder))
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
