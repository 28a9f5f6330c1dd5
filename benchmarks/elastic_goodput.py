"""Samples a second of elastic jobs with a slow rank and repeated kills, as a share of what the living ranks could do.

    launch/run python benchmarks/elastic_goodput.py --seconds 120 --kill-every 20
    launch/run python benchmarks/elastic_goodput.py --modes wait-free sync --repeats 3

Each job has four ranks, one of which takes twice as long for a sample; a sleep stands for the computation of a sample.
A random other rank is killed (SIGKILL) at equal intervals, and a new process takes its place. The modes take turns.
Prints the samples that have entered the model, as a share of those that every process could have computed alone, as
fast as one that trains alone does, from its first step to its last: the median over repeats, lowest and highest. Adds
them to results/elastic_goodput.json, with which ``simulated_goodput.py`` is compared.
"""

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import keras
import tensorflow as tf
from keras import layers

import hvdtrain
from hvdtrain.distributed import runtime
from hvdtrain.system import environment
from hvdtrain.tasks import digits

RESULTS = Path(__file__).resolve().parent / "results" / "elastic_goodput.json"
RANKS, BATCH_SIZE, SAMPLE_S, SLOWER = 4, 24, 0.004, 2
TIMES = "GOODPUT_BENCHMARK_TIMES"
WITHOUT_WAITING = (RANKS - 1 + 1 / SLOWER) / (RANKS / SLOWER)
"""How many times as many samples ranks compute if none waits for the slow one."""
MODES = {
    "sync": [],
    "local": ["--mode", "local", "--sync-every", "8"],
    "overlap": ["--mode", "local", "--sync-every", "8", "--overlap"],
    "wait-free": ["--mode", "local", "--sync-every", "8", "--wait-free"],
    "wait-free, quorum": ["--mode", "local", "--sync-every", "8", "--wait-free", "--round-quorum", str(RANKS - 1)],
}


def is_slow() -> bool:
    """Whether this process stands for a slow machine: it is never killed."""
    return environment.elastic_worker() == 0


@keras.saving.register_keras_serializable()
class Computation(layers.Layer):
    """Takes a time for each sample of a step, and notes when the step was made."""

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        if not training or TIMES not in os.environ:
            return x

        def compute(samples: int) -> int:
            time.sleep(float(samples) * SAMPLE_S * (SLOWER if is_slow() else 1))
            # A newcomer to an elastic job compiles its step by making one alone.
            if runtime.collectives().size > 1 or environment.elastic_job() is None:
                with Path(os.environ[TIMES], str(os.getpid())).open("a") as file:
                    file.write(f"{time.time()} {int(samples)} {is_slow():d}\n")
            return samples

        with tf.control_dependencies([tf.numpy_function(compute, [tf.shape(x)[0]], tf.int32)]):
            return tf.identity(x)


def make_model(data: hvdtrain.data.Data) -> keras.Model:
    return keras.Sequential([layers.Input((8, 8, 1)), layers.Flatten(), Computation(), layers.Dense(10)])


TASK = hvdtrain.Task(
    model=make_model,
    data=digits.read_data,
    loss=digits.TASK.loss,
    defaults={"learning_rate": 1e-4, "log_every": 10, "eval_every": 10**6},
)


def notes_in(folder: Path) -> dict[int, list[tuple[float, int, bool]]]:
    """The steps of each process: when, of how many samples, whether it is the slow one."""
    found = {}
    for path in folder.iterdir():
        lines = [line.split() for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        found[int(path.name)] = [(float(at), int(samples), slow == "1") for at, samples, slow in lines]
    return found


def step_alone_s(folder: Path) -> float:
    """The seconds of a step of one process that trains alone."""
    folder.mkdir()
    line = [sys.executable, "-m", "hvdtrain", "--task", __file__, "--run-dir", str(folder / "run")]
    line += ["--batch-size", str(BATCH_SIZE), "--steps", "100"]
    times = folder / "times"
    times.mkdir()
    subprocess.run(line, env={**os.environ, TIMES: str(times)}, check=True, capture_output=True)
    (steps,) = notes_in(times).values()
    return statistics.median(later - earlier for (earlier, *_), (later, *_) in itertools.pairwise(steps))


def possible_samples(folder: Path, step_s: float) -> float:
    """What each process could have computed alone between its first and its last step."""
    slow_step_s = step_s + BATCH_SIZE * SAMPLE_S * (SLOWER - 1)
    return sum(
        (last - first) / (slow_step_s if slow else step_s) * BATCH_SIZE
        for steps in notes_in(folder).values()
        for (first, _, slow), (last, _, _) in [(steps[0], steps[-1])]
    )


def measure(
    mode: str, folder: Path, seconds: float, every_s: float, step_s: float, generator: random.Random
) -> dict[str, float]:
    """Trains for about this time, killing ranks."""
    times = folder / "times"
    times.mkdir(parents=True)
    steps = seconds / (BATCH_SIZE * SAMPLE_S * SLOWER) * (WITHOUT_WAITING if mode.startswith("wait-free") else 1)
    line = [sys.executable, "-m", "hvdtrain", "elastic", f"1:{RANKS}", sys.executable, "-m", "hvdtrain"]
    line += ["--task", __file__, "--run-dir", str(folder / "run"), "--steps", str(round(steps))]
    line += ["--checkpoint-every", "0", "--global-batch-size", str(RANKS * BATCH_SIZE), *MODES[mode]]
    output = folder / "output"
    with output.open("w") as file:
        job = subprocess.Popen(line, env={**os.environ, TIMES: str(times)}, stdout=file, stderr=file)
    kills = 0
    try:
        while len(notes_in(times)) < RANKS and job.poll() is None:
            time.sleep(0.1)
        next_s = time.time() + every_s
        while job.poll() is None:
            if time.time() > next_s:
                noted = notes_in(times).items()
                living = [pid for pid, made in noted if time.time() - made[-1][0] < 3 and not made[0][2]]
                if living:
                    os.kill(generator.choice(living), signal.SIGKILL)
                    kills += 1
                next_s += every_s
            time.sleep(0.1)
    finally:
        job.kill()
    if job.returncode != 0:
        sys.exit(output.read_text())
    summary = json.loads((folder / "run" / "summary.json").read_text())
    lost = summary.get("lost_steps", 0) * BATCH_SIZE
    # Without waiting, samples are counted when they are averaged.
    entered = summary["samples"] - (0 if mode.startswith("wait-free") else lost)
    noted = notes_in(times).values()
    return {
        "share": entered / possible_samples(times, step_s),
        "kills": kills,
        "lost share": lost / entered,
        "seconds": max(each[-1][0] for each in noted) - min(each[0][0] for each in noted),
        "pauses": len(summary["membership_changes"]),
        "paused seconds": summary["membership_seconds"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--kill-every", type=float, nargs="+", default=[20.0])
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    found: dict[tuple[str, float], list[float]] = {}
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    with tempfile.TemporaryDirectory() as folder:
        step_s = step_alone_s(Path(folder, "alone"))
        print(
            f"a step alone: {1000 * step_s:.1f} ms, of which {1000 * BATCH_SIZE * SAMPLE_S:.1f} ms are the sleep",
            flush=True,
        )
        for repeat, every_s, mode in itertools.product(range(arguments.repeats), arguments.kill_every, arguments.modes):
            place, generator = Path(folder, f"{mode}-{every_s}-{repeat}"), random.Random(repeat)
            measured = measure(mode, place, arguments.seconds, every_s, step_s, generator)
            print(mode, every_s, {name: round(value, 4) for name, value in measured.items()}, flush=True)
            found.setdefault((mode, every_s), []).append(measured["share"])
            rows.append({"mode": mode, "kill_every_s": every_s, "step_alone_s": step_s, **measured})
            RESULTS.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    for (mode, every_s), shares in found.items():
        spread = f"{statistics.median(shares):.3f} ({min(shares):.3f} to {max(shares):.3f})"
        print(f"{mode}, a kill every {every_s:g} s: {spread}")


if __name__ == "__main__":
    main()
