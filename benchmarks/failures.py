"""Injected failures in modes that promise equality: the final weights are those of an uninterrupted run.

    launch/run python benchmarks/failures.py --failures 100 --seed 1
    launch/run python benchmarks/failures.py --failures 20 --seed 2 --modes local sharded --survived 1 4

Trains two ranks in each mode once without failures. Then strikes runs at random moments: each job several times with
what it must survive, then with what ends it, and starts it again. After as many strikes as a run gets, its last job is
left to complete it, and the run is compared: weights, loss, metrics, evaluation, samples (with ``balance``, which
rounds differently from run to run: the weights to 1e-10 with one process, in double precision). After each job, none of
its processes, ports and shared memory may be left, and its ranks may gain two descriptors at most while it runs. Counts
are added to benchmarks/results/failures.json, so that many short calls with different seeds make a long campaign. Exits
with 1 if a run differs. Needs root, for networks and disks of its own.

A failure counts if it has hit:

* pause: SIGSTOP to a random rank and SIGCONT within a second; it was seen standing still
* jump: the wall clock of a rank moves by up to ten days; the rank has read it since
* cut: the loopback interface is down for up to 0.8 s, under Gloo, whose ranks communicate over it
* full: the disk of the run is full until the job reports it
* refuse: the object store of the run refuses connections until the job reports it
* slow: each answer of the object store takes half a second longer, for two seconds; answers were due
* kill, stop, end: SIGKILL, SIGSTOP beyond the stall timeout, SIGTERM to a random rank; they end the job
* damage: SIGKILL, and a byte of the newest checkpoint is changed
* nan: a gradient that is not finite on one rank; all have skipped the step

Elastic jobs have ``elastic_soak.py``, where processes also join.
"""

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "parallel")]

import failure_results
import numpy as np
import surroundings
from elastic_runs import weights
from launcher import Job, listening
from s3_server import S3Server
from surroundings import Clocks, Disk, Usage, wait_until

from hvdtrain.runs.run_record import read_run

STEPS, CHECKPOINT_EVERY, LOG_EVERY = 1200, 25, 10
STRIKES_OF_A_RUN = 60
STALL_S = 12
PACE, UNEVEN_PACE = 0.025 / 32, 0.002 / 32
"""Seconds for each sample: of a run that is struck, and of one that is recorded, whose rank 1 is slower."""
MOST_DIFFERENCE = 1e-10
COMPARED = ("weights_sha256", "loss", "metrics", "eval", "samples", "skipped_steps")
OPTIONS = ["--steps", STEPS, "--checkpoint-every", CHECKPOINT_EVERY, "--log-every", LOG_EVERY, "--eval-every", 500]
OPTIONS += ["--stall-timeout", STALL_S, "--on-unequal", "ignore"]
WRITES = ("full", "refuse")
LINES_OF_TWO_CHECKPOINTS = 2 * CHECKPOINT_EVERY // LOG_EVERY + 1
ENDS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "end": signal.SIGTERM, "damage": signal.SIGKILL}
END_WEIGHTS = {"kill": 4, "stop": 1, "end": 2, "damage": 3}


class Mode(NamedTuple):
    """How runs are trained, and compared."""

    options: tuple[object, ...] = ()
    environment: Mapping[str, str] = {}
    is_replayed: bool = False
    """Runs repeat the recorded contributions of the uninterrupted one."""
    equals_one_process: bool = False
    """Runs are compared with one process instead of another run, whose order of sums would differ."""
    is_stored: bool = False
    """Runs are in an object store instead of on a disk."""


MODES = {
    "sync": Mode(),
    "deterministic": Mode(("--deterministic",)),
    "nan": Mode(("--on-nan", "skip"), {"STRUCK_NAN": "1"}),
    "sharded": Mode(("--shard-optimizer", "--ema", 0.99)),
    "powersgd": Mode(("--compression", "powersgd:2")),
    "fp16": Mode(("--compression", "fp16")),
    "local": Mode(("--mode", "local", "--sync-every", 8)),
    "overlap": Mode(("--mode", "local", "--sync-every", 8, "--overlap", "--outer", "nesterov", "--deterministic")),
    "quorum": Mode(("--quorum", 1), is_replayed=True),
    "wait-free": Mode(("--mode", "local", "--sync-every", 8, "--wait-free"), is_replayed=True),
    "balance": Mode(
        ("--balance", "--balance-every", 20), {"STRUCK_DOUBLE": "1", "STRUCK_UNEVEN": "1"}, equals_one_process=True
    ),
    "store": Mode(is_stored=True),
}


class Run:
    """A run of two ranks.

    Args:
        place: its path or URL.
        folder: of the mode, for files that its runs share.
    """

    def __init__(self, mode: Mode, place: str, folder: Path, clocks: Clocks):
        self.place = place
        self.pace = folder / "pace"
        self._mode = mode
        self._env = {**mode.environment, "STRUCK_PACE": str(self.pace), **clocks.environment}
        self._record = folder / "contributors.jsonl"

    def start(self, launcher: str) -> Job:
        replay = ("--replay", self._record) if self._mode.is_replayed else ()
        return self._start([*self._mode.options, *replay], 2, launcher, self._env)

    def train_uninterrupted(self) -> None:
        """The run that others must equal."""
        if self._mode.is_replayed:
            # Ranks contribute differently, which others repeat whatever their own speed.
            self.pace.write_text(str(UNEVEN_PACE))
            env = {**self._env, "STRUCK_UNEVEN": "1"}
            job = self._start([*self._mode.options, "--record", self._record], 2, "mpirun", env)
        elif self._mode.equals_one_process:
            job = self._start(["--batch-size", 64], 1, "", self._env)
        else:
            job = self._start(self._mode.options, 2, "mpirun", self._env)
        complete(job)
        self.pace.unlink(missing_ok=True)

    def _start(self, options: Any, ranks: int, launcher: str, env: Mapping[str, str]) -> Job:
        words = ["--task", ROOT / "benchmarks" / "struck_task.py", "--run-dir", self.place, *OPTIONS, *options]
        with environment(env):
            line = [sys.executable, "-m", "hvdtrain", *map(str, words)]
            return Job(line, ranks=ranks, launcher=launcher)

    def newest_checkpoint(self) -> Path | None:
        found = [] if "://" in self.place else sorted(Path(self.place, "checkpoints").glob("step-????????"))
        # The one before is what a damaged one falls back to.
        return found[-1] if len(found) > 1 else None


def complete(job: Job) -> None:
    """Waits for a job, which must succeed."""
    try:
        ended = job.end(600)
    finally:
        job.kill()
    assert ended.code == 0, f"exit code {ended.code}: {ended.output}"


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class StruckJob:
    """A job of a run, and what can happen to it.

    Args:
        disk: None: the run is in a store.
        store: None: the run is on a disk.
    """

    def __init__(self, run: Run, generator: random.Random, disk: Disk | None, store: S3Server | None, clocks: Clocks):
        self._random = generator
        self._ports_before = set(listening())
        launcher = generator.choice(["mpirun", "horovodrun --gloo"])
        self.job = run.start(launcher)
        self._run = run
        self._clocks = clocks
        self.usage: dict[int, list[Usage]] = {0: [], 1: []}
        """Of each rank, at each failure."""
        self._ranks: list[int] = []
        """Their processes."""
        self._writes_again_at = 0
        """Before it has logged so often, no write may fail again: three in succession end the job."""
        self._survived: dict[str, Callable[[], bool]] = {"pause": self._pause, "jump": self._jump}
        if "gloo" in launcher:
            self._survived["cut"] = self._cut
        if disk is not None:
            # Shorter than two checkpoints: the job's message may be late, and three failures in succession end it.
            self._survived["full"] = lambda: disk.fill_until(self._prints("hvdtrain: "), 1.2)
        if store is not None:
            self._survived["refuse"] = lambda: store.refuse_until(self._prints("hvdtrain: "), 6)
            self._survived["slow"] = lambda: store.slow_for(2, delay_s=0.5) > 0

    def trains_on(self, most_s: float = 120) -> bool:
        """Waits until it logs another step; False if it has ended."""
        advances = self._prints("examples/s")
        assert wait_until(advances, most_s), f"the job stands still: {self.job.output}"
        return self.job.is_running

    def survive(self) -> str | None:
        """Strikes it with what it must survive; returns the kind, None if that has not hit."""
        self._ranks = self._ranks or [self.job.rank(0), self.job.rank(1)]
        time.sleep(self._random.uniform(0.0, 0.3))
        may_fail = self._num_logged() >= self._writes_again_at
        kind = self._random.choice([each for each in self._survived if may_fail or each not in WRITES])
        hit = self._survived[kind]()
        if kind in WRITES:
            self._writes_again_at = self._num_logged() + LINES_OF_TWO_CHECKPOINTS
        for used, pid in zip(self.usage.values(), self._ranks, strict=True):
            if found := surroundings.usage(pid):
                used.append(found)
        return kind if hit else None

    def _num_logged(self) -> int:
        return self.job.output.count("examples/s")

    def end(self) -> str | None:
        """Strikes it with what ends it; returns the kind, None if it was complete already."""
        kind = self._random.choices(list(END_WEIGHTS), list(END_WEIGHTS.values()))[0]
        if kind == "damage" and self._run.newest_checkpoint() is None:
            kind = "kill"
        time.sleep(self._random.uniform(0.0, 0.5))
        if not self.job.is_running or not surroundings.send(self._random_rank(), ENDS[kind]):
            return None
        ended = self.job.end(60 + 4 * STALL_S)
        if ended.code == 0:
            return None
        assert ended.code in (1, 75, 134, 137, 143), f"exit code {ended.code}: {ended.output}"
        if kind == "damage":
            damage(self._run.newest_checkpoint(), self._random)
        return kind

    def require_nothing_left(self) -> None:
        """Fails if it has left or gained something."""
        left = surroundings.left_behind(self.job.processes, self._ports_before)
        assert not left, f"left behind: {left}"
        assert self.descriptors_gained() <= surroundings.MOST_DESCRIPTORS, f"descriptors at each failure: {self.usage}"

    def descriptors_gained(self) -> int:
        return max(map(surroundings.descriptors_gained, self.usage.values()))

    def memory_gained_mib(self) -> float:
        return max((used[-1].memory_mib - used[0].memory_mib for used in self.usage.values() if used), default=0.0)

    def _random_rank(self) -> int:
        return self._random.choice(self._ranks)

    def _pause(self) -> bool:
        return surroundings.suspend(self._random_rank(), self._random.uniform(0.1, 0.8))

    def _jump(self) -> bool:
        seconds = int(self._random.choice([-1, 1]) * 10 ** self._random.uniform(0, 5.9365))
        return self._clocks.jump(self._random_rank(), seconds)

    def _cut(self) -> bool:
        surroundings.cut_link(self._random.uniform(0.1, 0.8))
        return self.job.is_running

    def _prints(self, text: str) -> Callable[[], bool]:
        """Whether it has printed a text since, or ended."""
        before = self.job.output.count(text)
        return lambda: self.job.output.count(text) > before or not self.job.is_running


def damage(checkpoint: Path | None, generator: random.Random) -> None:
    """Changes a byte of a file."""
    assert checkpoint is not None
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.stat().st_size)
    path = generator.choice(files)
    content = bytearray(path.read_bytes())
    content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
    path.write_bytes(content)


def struck(
    run: Run, make_job: Callable[[], StruckJob], generator: random.Random, survived: tuple[int, int]
) -> Iterator[tuple[str, StruckJob]]:
    """Strikes the jobs of a run until it has had its failures, and completes it; yields each failure.

    Args:
        survived: least and most failures that a job must survive, before one that ends it.
    """
    num_strikes = 0
    run.pace.write_text(str(PACE))
    is_complete = False
    while not is_complete:
        struck_job = make_job()
        job = struck_job.job
        try:
            kind: str | None = None
            for _ in range(generator.randint(*survived)):
                if not struck_job.trains_on():
                    break
                if (kind := struck_job.survive()) is not None:
                    num_strikes += 1
                    yield kind, struck_job
            if num_strikes < STRIKES_OF_A_RUN and struck_job.trains_on():
                if (kind := struck_job.end()) is not None:
                    num_strikes += 1
                    yield kind, struck_job
            else:
                run.pace.unlink()
            ended = job.end(600)
            is_complete = ended.code == 0
            assert is_complete or kind in ENDS, f"a {kind} has ended the job: {ended.output}"
            struck_job.require_nothing_left()
        except AssertionError:
            print(job.output[-6000:], flush=True)
            raise
        finally:
            job.kill()


def differences(run: Run, uninterrupted: Run, mode: Mode) -> list[str]:
    """What must be equal in two complete runs, and is not."""
    ours, theirs = read_run(run.place).summary, read_run(uninterrupted.place).summary
    names = COMPARED
    found = []
    if mode.equals_one_process:
        names = ("samples", "skipped_steps")
        one = weights(Path(uninterrupted.place))
        difference = max(np.abs(weights(Path(run.place))[key] - b).max() / np.abs(b).max() for key, b in one.items())
        print(f"largest relative difference from one process: {difference:.1e}", flush=True)
        found = [f"weights by {difference:.1e}"] if difference > MOST_DIFFERENCE else []
    return found + [f"{name}: {ours[name]} and {theirs[name]}" for name in names if ours[name] != theirs[name]]


class Campaign:
    """The runs of one mode, and what happened in them."""

    def __init__(self, name: str, seed: int, survived: tuple[int, int]):
        self._mode = MODES[name]
        self._survived = survived
        self._random = random.Random(f"{name} {seed}")
        self.failures = Counter[str]()
        self.num_runs = self.num_jobs = 0
        self.different: list[str] = []
        self.worst = {"descriptors_gained": 0.0, "memory_gained_mib": 0.0}

    def run(self, num_failures: int) -> None:
        """Strikes runs until so many failures have happened."""
        with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
            folder = Path(name)
            clocks = Clocks(folder)
            (folder / "runs").mkdir()
            place, disk, store = str(folder / "runs"), None, None
            if self._mode.is_stored:
                store = S3Server()
                stack.callback(store.close)
                place = store.url
            else:
                disk = Disk(folder / "runs")
                stack.callback(disk.close)
            uninterrupted = Run(self._mode, str(folder / "uninterrupted"), folder, clocks)
            uninterrupted.train_uninterrupted()
            while self.failures.total() < num_failures:
                run = Run(self._mode, f"{place}/{self.num_runs}", folder, clocks)
                self._strike(run, lambda run=run: StruckJob(run, self._random, disk, store, clocks))
                self.different += differences(run, uninterrupted, self._mode)

    def _strike(self, run: Run, make_job: Callable[[], StruckJob]) -> None:
        jobs = set()
        for kind, job in struck(run, make_job, self._random, self._survived):
            self.failures[kind] += 1
            jobs.add(job)
        self.num_runs += 1
        self.num_jobs += len(jobs)
        self.failures["nan"] += read_run(run.place).summary.get("skipped_steps") or 0
        for job in jobs:
            self.worst["descriptors_gained"] = max(self.worst["descriptors_gained"], job.descriptors_gained())
            self.worst["memory_gained_mib"] = max(self.worst["memory_gained_mib"], round(job.memory_gained_mib(), 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--failures", type=int, default=10, help="at least, in each mode")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--survived",
        nargs=2,
        type=int,
        default=(20, 28),
        help="least and most failures of a job before one that ends it",
    )
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    arguments = parser.parse_args()
    surroundings.leave_the_machine()
    wrong: list[str] = []
    for name in arguments.modes:
        began_s = time.monotonic()
        campaign = Campaign(name, arguments.seed, tuple(arguments.survived))
        campaign.run(arguments.failures)
        happened, different = +campaign.failures, campaign.different
        wrong += different
        print(
            f"{name}: {dict(happened)} in {campaign.num_runs} run(s) of {campaign.num_jobs} job(s), "
            f"{time.monotonic() - began_s:.0f} s; {campaign.worst}; {'; '.join(different) or 'all equal'}",
            flush=True,
        )
        counts = {"runs": campaign.num_runs, "jobs": campaign.num_jobs, "different": len(different)}
        failure_results.add(name, happened, arguments.seed, campaign.worst, **counts)
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
