"""Random events in an elastic job: nothing hangs, no sample is lost or used twice, and nothing is left behind.

    launch/run python benchmarks/elastic_soak.py --events 60 --seed 1
    launch/run python benchmarks/elastic_soak.py --events 20 --seed 2 --kinds kill join

Trains a small network in double precision with two to four processes and makes events happen at random times to random
ones: SIGKILL, SIGSTOP past the stall timeout, SIGTERM, which makes a process leave, and a new process with ``--join``.
With ``--lab`` (root needed) the job has two hosts of launch/lab, and the link between them is cut as well. Then
compares the run with one process and prints the difference of the weights, and the descriptors and memory of the
oldest process at each change of members. One process is left alone, so that there is an oldest one. Exits with 1 if
a rule is broken.

``--wait-free`` trains by local SGD without waiting. There, each average must be bit-identical in all processes that
received it, and the samples of all steps must have been averaged, except for those of lost processes since their last
contribution: at most four rounds of each, and what a process on a host that is cut off makes until it ends. Training
itself fails if the ranks are not equal at the end. Options after ``--`` are added to those of the training.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "parallel"), str(ROOT / "launch" / "lab")]

from elastic_runs import GLOBAL_BATCH, TRAIN, compared_averages, summary, train_alone, weights
from laboratory import Laboratory

STALL_S, STEP_S = 15.0, 0.03
NOTED_S = 3.0
"""A process that trains has noted a step within this time."""
MOST = 4
WAIT_FREE = ("--mode", "local", "--sync-every", "8", "--wait-free")
MOST_LOST_STEPS = 4 * 8
"""Of a lost process, with WAIT_FREE: those of its last contribution and since, while it waited for others as well."""
MOST_LOST_STEPS_OF_CUT = MOST_LOST_STEPS + round(2 * STALL_S / STEP_S)
"""It trains on until it notices."""
LOSSES = ("kill", "stop", "cut")
KINDS = ("kill", "stop", "leave", "join", "cut")


class Usage(NamedTuple):
    """What the oldest process holds."""

    changes: int
    descriptors: int
    memory_mib: float


class Soak:
    """A job with random events.

    Args:
        folder: for the run and the output of the job.
        lab: where its processes run; None: on this host.
        options: of local SGD, whose samples are noted.
    """

    def __init__(self, folder: Path, steps: int, seed: int, lab: Laboratory | None, options: Sequence[str]):
        self.folder = folder
        self.run_dir = folder / "run"
        self._lab = lab
        self._random = random.Random(seed)
        self._log = (folder / "output.txt").open("w")
        self._train = [*TRAIN, "--run-dir", str(self.run_dir), "--steps", str(steps), "--log-every", "100"]
        self._train += ["--stall-timeout", str(STALL_S), "--global-batch-size", str(GLOBAL_BATCH)]
        self._train += ["--checkpoint-every", "500", *options]
        where = ["--hosts", "lab1:2,lab2:1"] if lab else ["--np", "3"]
        elastic = [sys.executable, "-m", "hvdtrain", "elastic", f"1:{MOST}", *where]
        self._fewest = 3 if options else 2
        """With fewer, another one joins: steps of a process alone are not noted."""
        self._steps, self.averages = folder / "steps", folder / "averages"
        self._steps.mkdir()
        self.averages.mkdir()
        self._env = {**os.environ, "HVDTRAIN_TEST_STEP_S": str(STEP_S), "HVDTRAIN_ELASTIC_TOKEN": "soak"}
        if options:
            self._env["HVDTRAIN_TEST_SAMPLES"] = str(self._steps)
            self._env["HVDTRAIN_TEST_AVERAGES"] = str(self.averages)
        self.job = self._start([*elastic, *self._train])
        self._joined: list[subprocess.Popen[bytes]] = []
        self.happened: dict[str, int] = {}
        self.usage: list[Usage] = []

    def _start(self, line: list[str]) -> "subprocess.Popen[bytes]":
        line = self._lab.command("lab1", line) if self._lab else line
        return subprocess.Popen(line, env=self._env, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True)

    @property
    def output(self) -> str:
        return (self.folder / "output.txt").read_text()

    def noted_samples(self) -> int:
        """Samples of the steps that all processes have made."""
        return sum(int(line) for path in self._steps.iterdir() for line in path.read_text().splitlines())

    def members(self) -> list[psutil.Process]:
        """The training processes, oldest first."""
        found = []
        for process in psutil.process_iter(["cmdline", "create_time", "status"]):
            line = process.info["cmdline"] or [""]
            trains = "python" in line[0] and str(self.run_dir) in line and "elastic" not in line
            if trains and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
        return sorted(found, key=lambda process: process.info["create_time"])

    def _victims(self, members: list[psutil.Process]) -> list[psutil.Process]:
        """Processes that train, but for the oldest."""
        noted = {path.stem for path in self._steps.iterdir() if time.time() - path.stat().st_mtime < NOTED_S}
        # More processes than may train wait: mostly the newest ones.
        return [process for process in members[1:] if str(process.pid) in noted] or members[1:MOST]

    def _is_on_second_host(self, members: list[psutil.Process]) -> bool:
        """Whether a cut is a loss: the process of a slot that lost several waits before it starts again."""
        namespace = f"net:[{Path('/run/netns/lab2').stat().st_ino}]"
        with contextlib.suppress(OSError):
            return any(os.readlink(f"/proc/{process.pid}/ns/net") == namespace for process in members)
        return False

    def _changes(self) -> int:
        return self.output.count("hvdtrain elastic: generation")

    def _has_trained(self) -> bool:
        """Whether it has logged steps since all processes last started: if one is lost before, all start again."""
        log = self.run_dir / "metrics.jsonl"
        lines = log.read_text().splitlines() if log.exists() else []
        starts = [i for i, line in enumerate(lines) if '"event": "start"' in line]
        return any('"event": "train"' in line for line in lines[starts[-1] if starts else 0 :])

    def _all_train(self, members: list[psutil.Process]) -> bool:
        """Whether as many processes train as can."""
        lines = [line for line in self.output.splitlines() if line.startswith("hvdtrain elastic: generation")]
        ranks = int(lines[-1].split(": ")[2].split()[0]) if lines else 0
        return ranks >= 1 and ranks == min(MOST, len(members))

    def _settle(self) -> bool:
        """Waits until the job trains with all its processes; False if it has ended."""
        until_s = time.monotonic() + 180
        while self.job.poll() is None:
            if self._all_train(self.members()) and self._has_trained():
                return True
            if time.monotonic() > until_s:
                raise SystemExit(f"the job does not train: {self.output[-3000:]}")
            time.sleep(0.2)
        return False

    def event(self, kinds: tuple[str, ...]) -> bool:
        """Makes one event happen; False if the job has ended."""
        members: list[psutil.Process] = []
        # A process may have been started meanwhile, and the others be too few to lose one.
        while not self._all_train(members):
            if not self._settle():
                return False
            time.sleep(self._random.uniform(0.0, 1.5))
            members = self.members()
        oldest = members[0]
        with contextlib.suppress(psutil.Error):
            self.usage.append(Usage(self._changes(), oldest.num_fds(), oldest.memory_info().rss / 2**20))
        kind = self._random.choice(kinds)
        if len(members) < self._fewest or (kind == "cut" and not self._is_on_second_host(members)):
            kind = "join"
        if kind == "join" and len(members) >= MOST:
            kind = "leave" if "leave" in kinds else "kill"
        self.happened[kind] = self.happened.get(kind, 0) + 1
        before = self._changes()
        if kind == "join":
            port = self.output.partition("join at ")[2].split()[0]
            self._joined.append(self._start([*self._train, "--join", port]))
        elif kind == "cut":
            assert self._lab
            self._lab.cut("lab2")
            time.sleep(STALL_S + 3)
            self._lab.restore("lab2")
        else:
            number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "leave": signal.SIGTERM}[kind]
            victim = self._random.choice(self._victims(members))
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.send_signal(number)
        until_s = time.monotonic() + 60
        while self._changes() == before and self.job.poll() is None:
            if time.monotonic() > until_s:
                raise SystemExit(f"nothing happened after {kind}: {self.output[-3000:]}")
            time.sleep(0.05)
        if kind == "stop" and victim.pid in [process.pid for process in self._joined]:
            victim.kill()  # The coordinator kills only what it has started.
        return self.job.poll() is None

    def end(self) -> int:
        code = self.job.wait(1200)
        for process in self._joined:
            process.wait(60)
        return code

    def kill(self) -> None:
        for process in [self.job, *self._joined]:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        for process in self.members():
            process.kill()


def compared_with_one(run_dir: Path, one: Path) -> bool:
    """Prints the differences from one process; returns whether they break a rule."""
    ours, expected = weights(run_dir), weights(one)
    difference = max(np.abs(ours[key] - b).max() / max(np.abs(b).max(), 1e-9) for key, b in expected.items())
    samples = summary(run_dir)["samples"], summary(one)["samples"]
    print(f"largest relative difference from one process: {difference:.1e}")
    print("samples: {}, one process {}".format(*samples))
    return bool(difference > 1e-10) or samples[0] != samples[1]


def compared(soak: Soak, found: dict[str, Any]) -> bool:
    """Prints what became of the samples without waiting; returns whether they break a rule."""
    noted, averaged = soak.noted_samples(), found["samples"]
    losses = sum(soak.happened.get(kind, 0) for kind in LOSSES)
    cuts = soak.happened.get("cut", 0)
    most = ((losses - cuts) * MOST_LOST_STEPS + cuts * MOST_LOST_STEPS_OF_CUT) * GLOBAL_BATCH
    print(
        f"samples: {noted} in steps, {averaged} averaged, {noted - averaged} lost with {losses} processes; most {most}"
    )
    print(f"averages: {found['averaging_rounds']}, lost steps by the job's estimate: {found['lost_steps']}")
    averages = compared_averages(soak.averages)
    print(
        f"averages in several processes: {averages.shared}; different in some: {len(averages.differing)}; made again "
        f"because only a lost process had received them: {averages.repeated}"
    )
    return not 0 <= noted - averaged <= most or bool(averages.differing) or not averages.shared


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["kill", "stop", "leave", "join"])
    parser.add_argument("--steps", type=int, help="default: 500 for each event")
    parser.add_argument("--wait-free", action="store_true", help="by local SGD without waiting")
    parser.add_argument("more", nargs="*", help="options of the training, after --")
    parser.add_argument("--lab", action="store_true", help="on two hosts of launch/lab")
    arguments = parser.parse_args()
    steps = arguments.steps or 500 * arguments.events
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        lab = stack.enter_context(Laboratory(2)) if arguments.lab else None
        soak = Soak(
            Path(name), steps, arguments.seed, lab, [*WAIT_FREE, *arguments.more] if arguments.wait_free else []
        )
        try:
            kinds = (*arguments.kinds, *(["cut"] if lab else []))
            num = 0
            while num < arguments.events and soak.event(kinds):
                num += 1
            code = soak.end()
            left = soak.members()
            found = summary(soak.run_dir)
            one = None if arguments.wait_free else train_alone(Path(name, "one"), steps, timeout_s=1200)
        except BaseException:
            print(soak.output[-4000:])
            raise
        finally:
            soak.kill()
        first, last = soak.usage[0], soak.usage[-1]
        print(json.dumps({"events": num, **soak.happened, "generations": soak._changes(), "exit_code": code}))
        is_wrong = compared(soak, found) if one is None else compared_with_one(soak.run_dir, one)
        print(f"oldest process: {first} … {last}, most {max(u.descriptors for u in soak.usage)} descriptors")
        print("MiB at each change:", *(f"{each.changes}: {each.memory_mib:.0f}" for each in soak.usage))
        print(f"processes left: {len(left)}")
        wrong = code != 0 or is_wrong or left
        wrong = wrong or num < arguments.events or "terminate called" in soak.output
        if wrong:
            print(soak.output[-6000:])
        raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
