"""Injected failures in modes that promise equality: the final weights are those of an uninterrupted run.

    launch/run python benchmarks/failures.py --failures 100 --seed 1
    launch/run python benchmarks/failures.py --failures 20 --seed 2 --modes local sharded

Trains two ranks in each mode once without failures. Then starts runs that are struck at random moments, and started
again where a failure ends the job, until all failures have happened; each run is completed and compared: weights, loss,
metrics, evaluation, samples. After each job, none of its processes may be left. Counts are added to
benchmarks/results/failures.json, so that many short calls with different seeds make a long campaign. Exits with 1 if a
run differs.

* kill, stop, end: SIGKILL, SIGSTOP beyond the stall timeout, SIGTERM to a random rank
* damage: SIGKILL, and a byte of the newest checkpoint is changed
* full: the disk of the run is full for a second (needs root)
* refuse: the object store of the run refuses connections for two seconds
* nan: a gradient that is not finite, skipped by ``--on-nan skip`` (in runs without other failures too)

Elastic jobs have ``elastic_soak.py``, which also makes processes join and cuts links.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "parallel")]

import keras
import tensorflow as tf
from keras import layers
from launcher import Job
from s3_server import S3Server

import hvdtrain
from hvdtrain.checkpoint.storage import checkpoints_in
from hvdtrain.errors import DataError
from hvdtrain.runs.run_record import read_run
from hvdtrain.system.json_files import read_object
from hvdtrain.tasks import digits

RESULTS = ROOT / "benchmarks" / "results" / "failures.json"
STEPS, CHECKPOINT_EVERY, NAN_EVERY = 3000, 50, 400
STRIKES_OF_A_RUN = 6
STALL_S = 8
COMPARED = ("weights_sha256", "loss", "metrics", "eval", "samples", "skipped_steps")
OPTIONS = ["--steps", STEPS, "--checkpoint-every", CHECKPOINT_EVERY, "--log-every", 25, "--eval-every", 1000]
OPTIONS += ["--stall-timeout", STALL_S, "--on-unequal", "ignore"]

MODES = {
    "sync": [],
    "deterministic": ["--deterministic"],
    "nan": ["--on-nan", "skip"],
    "sharded": ["--shard-optimizer", "--ema", 0.99],
    "powersgd": ["--compression", "powersgd:2"],
    "fp16": ["--compression", "fp16"],
    "local": ["--mode", "local", "--sync-every", 8],
    "overlap": ["--mode", "local", "--sync-every", 8, "--overlap", "--outer", "nesterov"],
    "quorum": ["--quorum", 1],
    "store": [],
}
ENDS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "end": signal.SIGTERM, "damage": signal.SIGKILL}


@keras.saving.register_keras_serializable()
class SometimesNaN(layers.Layer):
    """In a job with ``FAILURES_NAN``, the output of every 400th step is not finite."""

    def build(self, shape: tuple[int, ...]) -> None:
        self.steps = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        if not training or "FAILURES_NAN" not in os.environ:
            return x
        self.steps.assign_add(1)
        return tf.where(self.steps.value % NAN_EVERY == 0, x * float("nan"), x)


def make_model(data: hvdtrain.data.Data) -> keras.Model:
    return keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Flatten(),
            layers.Dense(48, activation="relu"),
            layers.BatchNormalization(momentum=0.9),
            layers.Dropout(0.2),
            SometimesNaN(),
            layers.Dense(10),
        ]
    )


TASK = hvdtrain.Task(
    model=make_model, data=digits.read_data, loss=digits.TASK.loss, metrics=digits.TASK.metrics, optimizer="adam"
)


class Disk:
    """A small file system that can be filled."""

    def __init__(self, folder: Path):
        self.folder = folder
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(folder)], check=True)

    def fill_for(self, seconds: float) -> None:
        filler = self.folder / "filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(1 << 16)):
                pass
        time.sleep(seconds)
        filler.unlink()

    def close(self) -> None:
        subprocess.run(["umount", "--lazy", str(self.folder)], check=True)


class Run:
    """A run that is struck, and started again until it is complete.

    Args:
        place: its path or URL.
    """

    def __init__(self, mode: str, place: str, replay: Path | None, generator: random.Random):
        self.place = place
        self._random = generator
        self._env = {"FAILURES_NAN": "1"} if mode == "nan" else {}
        more = [] if replay is None else ["--record" if not replay.exists() else "--replay", replay]
        words = ["--task", __file__, "--run-dir", place, *OPTIONS, *MODES[mode], *more]
        self._train = [sys.executable, "-m", "hvdtrain", *map(str, words)]

    def start(self) -> Job:
        with environment(self._env):
            return Job(self._train, ranks=2, launcher=self._random.choice(["mpirun", "horovodrun --gloo"]))

    def complete(self, timeout_s: float) -> None:
        job = self.start()
        try:
            ended = job.end(timeout_s)
        finally:
            job.kill()
        assert ended.code == 0, ended.output

    def newest_checkpoint(self) -> Path | None:
        found = [] if "://" in self.place else checkpoints_in(Path(self.place, "checkpoints"))
        # The one before is what a damaged one falls back to.
        return found[-1] if len(found) > 1 else None


@contextlib.contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def wait_until_it_trains(job: Job) -> bool:
    """False if the job has ended before."""
    until_s = time.monotonic() + 120
    while job.is_running:
        if "examples/s" in job.output:
            return True
        assert time.monotonic() < until_s, job.output
        time.sleep(0.05)
    return False


def strike(run: Run, surroundings: dict[str, Callable[[], None]], generator: random.Random) -> Iterator[str]:
    """Runs one job until it ends, with failures; yields each.

    Args:
        surroundings: what can happen outside of the job, by its kind; it goes on.
    """
    kinds = [*ENDS, *ENDS.keys() - {"stop"}, *surroundings, *surroundings]  # Others need less time than stop.
    job = run.start()
    try:
        while wait_until_it_trains(job):
            time.sleep(generator.uniform(0.0, 2.0))
            kind = generator.choice(sorted(kinds))
            if kind == "damage" and run.newest_checkpoint() is None:
                kind = "kill"
            if not job.is_running:
                break
            if kind in surroundings:
                surroundings[kind]()
                yield kind
                continue
            os.kill(job.rank(generator.randrange(2)), ENDS[kind])
            code = job.end(60 if kind != "stop" else 60 + 4 * STALL_S).code
            if code == 0:
                break  # It was complete already.
            if kind == "damage":
                damage(run.newest_checkpoint(), generator)
            yield kind
            break
        ended = job.end(120)
        left = job.processes()
        assert not left, f"processes were left: {left.keys()}"
        assert ended.code in (0, 1, 75, 134, 137, 143), ended.output
    finally:
        job.kill()


def damage(checkpoint: Path | None, generator: random.Random) -> None:
    """Changes a byte of a file."""
    assert checkpoint is not None
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.stat().st_size)
    path = generator.choice(files)
    content = bytearray(path.read_bytes())
    content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
    path.write_bytes(content)


def differences(one: str, other: str) -> list[str]:
    """What must be equal in two complete runs, and is not."""
    ours, theirs = read_run(one).summary, read_run(other).summary
    return [f"{name}: {ours[name]} and {theirs[name]}" for name in COMPARED if ours[name] != theirs[name]]


def struck_runs(mode: str, num_failures: int, generator: random.Random) -> tuple[Counter[str], int, list[str]]:
    """The failures of each kind, the number of runs, and what differs from the uninterrupted run."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        replay = folder / "contributors.jsonl" if mode == "quorum" else None
        uninterrupted = Run(mode, str(folder / "uninterrupted"), replay, generator)
        uninterrupted.complete(600)
        surroundings: dict[str, Callable[[], None]] = {}
        (folder / "runs").mkdir()
        place = str(folder / "runs")
        if mode == "store":
            server = S3Server()
            stack.callback(server.close)
            place, surroundings["refuse"] = server.url, lambda: server.refuse_for(2)
        elif os.geteuid() == 0:
            disk = Disk(folder / "runs")
            stack.callback(disk.close)
            surroundings["full"] = lambda: disk.fill_for(1)
        happened, num_runs, different = Counter[str](), 0, list[str]()
        while happened.total() < num_failures:
            run = Run(mode, f"{place}/{num_runs}", replay, generator)
            num_runs += 1
            in_this_run = 0
            while in_this_run < STRIKES_OF_A_RUN and not read_summary(run.place):
                for kind in strike(run, surroundings, generator):
                    happened[kind] += 1
                    in_this_run += 1
            run.complete(600)
            if mode == "nan":
                happened["nan"] += STEPS // NAN_EVERY
            different += [f"{mode}, run {num_runs}: {each}" for each in differences(run.place, uninterrupted.place)]
        return happened, num_runs, different


def read_summary(place: str) -> bool:
    """Whether a run is complete."""
    try:
        return bool(read_run(place).summary)
    except DataError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--failures", type=int, default=10, help="at least, in each mode")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    arguments = parser.parse_args()
    wrong: list[str] = []
    for mode in arguments.modes:
        happened, num_runs, different = struck_runs(mode, arguments.failures, random.Random(f"{mode} {arguments.seed}"))
        wrong += different
        print(f"{mode}: {dict(happened)} in {num_runs} runs; {'; '.join(different) or 'all equal'}", flush=True)
        results = read_object(RESULTS) if RESULTS.exists() else {}
        row = results.setdefault(mode, {"failures": {}, "runs": 0, "different": 0, "seeds": []})
        row["failures"] = dict(Counter(row["failures"]) + happened)
        row["runs"] += num_runs
        row["different"] += len(different)
        row["seeds"].append(arguments.seed)
        RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
