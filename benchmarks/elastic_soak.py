"""Random events in an elastic job: nothing hangs, no sample is lost or used twice, and nothing is left behind.

    launch/run python benchmarks/elastic_soak.py --events 60 --seed 1
    launch/run python benchmarks/elastic_soak.py --events 60 --seed 1 -- --balance --balance-every 20
    launch/run python benchmarks/elastic_soak.py --events 60 --seed 1 --wait-free

Trains a small network in double precision with up to four processes and makes events happen at random times to random
ones. Processes are added with ``--join`` while others train, so that there are some to lose. Then compares the run with
one process and prints the difference of the weights, and the descriptors and memory of the oldest process, which only
the events hit that it survives. Counts are added to benchmarks/results/failures.json. Exits with 1 if a rule is broken.

Events, each of which counts if it has hit:

* kill, leave, stop: SIGKILL, SIGTERM, SIGSTOP beyond the stall timeout; the members change
* join: another process joins those that train
* pause: SIGSTOP and SIGCONT within a second; the process was seen standing still
* jump: the wall clock of a process moves by up to ten days; it has read it since
* cut: the loopback interface is down for up to 0.8 s
* full: the disk of the run is full until the job reports it

Needs root, for a network and a disk of its own. With ``--lab`` the job has two hosts of launch/lab instead, and the
link between them is cut until the members change; nothing happens to disks and clocks then.

``--wait-free`` trains by local SGD without waiting. There, each average must be bit-identical in all processes that
received it, and the samples of all steps must have been averaged, except for those of lost processes since their last
contribution: at most four rounds of each, and what a process on a host that is cut off makes until it ends. Training
itself fails if the ranks are not equal at the end. Options after ``--`` are added to those of the training.
"""

import argparse
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "parallel"), str(ROOT / "launch" / "lab")]

import failure_results
import numpy as np
import psutil
import surroundings
from elastic_runs import GLOBAL_BATCH, TRAIN, summary, train_alone, weights
from laboratory import Laboratory
from launcher import listening
from shared_averages import compared_averages
from surroundings import Clocks, Disk, Usage, wait_until

STALL_S = 15.0
MOST = 4
MOST_STARTING = 2
"""Processes that start at a time, beside those that train."""
STEPS_OF_AN_EVENT = 45
PACE_S = 0.03
WAIT_FREE = ("--mode", "local", "--sync-every", "8", "--wait-free")
MOST_LOST_STEPS = 4 * 8
"""Of a lost process, with WAIT_FREE: those of its last contribution and since, while it waited for others as well."""
MOST_LOST_STEPS_OF_CUT = MOST_LOST_STEPS + round(2 * STALL_S / PACE_S)
"""It trains on until it notices."""
LOSSES = ("kill", "stop", "cut off")
CHANGES = {"kill": 4, "leave": 2, "stop": 0.2}
SIGNALS = {"kill": signal.SIGKILL, "leave": signal.SIGTERM, "stop": signal.SIGSTOP}
SURVIVED = {"pause": 2, "jump": 1, "cut": 1, "full": 1}
SELDOM = ("--log-every", "1000", "--eval-every", "1000")
KINDS = (*CHANGES, "join", *SURVIVED)
MOST_SURVIVED = 8
"""Without a change of members, while others start."""


class Soak:
    """A job with random events.

    Args:
        folder: for the run and the output of the job.
        lab: where its processes run; None: on this host.
        kinds: of the events.
        options: of the training.
        is_local: whether it is local SGD, whose averages are noted.
    """

    def __init__(
        self,
        folder: Path,
        steps: int,
        seed: int,
        lab: Laboratory | None,
        kinds: Sequence[str],
        options: Sequence[str],
        *,
        is_local: bool,
    ):
        self.folder = folder
        (folder / "disk").mkdir()
        self.run_dir = folder / "disk" / "run"
        self._lab = lab
        self._changes = {kind: weight for kind, weight in CHANGES.items() if kind in kinds}
        self._may_join = "join" in kinds
        not_in_a_lab = () if lab is None else ("jump", "cut", "full")
        self._survivable = {kind: SURVIVED[kind] for kind in SURVIVED if kind in kinds and kind not in not_in_a_lab}
        self._disk = None if lab else Disk(folder / "disk")
        self._clocks = None if lab else Clocks(folder)
        self._random = random.Random(seed)
        self._log = (folder / "output.txt").open("w")
        self._ports_before = set(listening())
        self._train = [*TRAIN, "--run-dir", str(self.run_dir), "--steps", str(steps), "--log-every", "10"]
        self._train += ["--stall-timeout", str(STALL_S), "--global-batch-size", str(GLOBAL_BATCH)]
        self._train += ["--checkpoint-every", "25", "--eval-every", "1000", *options]
        where = ["--hosts", "lab1:2,lab2:1"] if lab else ["--np", "3"]
        elastic = [sys.executable, "-m", "hvdtrain", "elastic", f"1:{MOST}", *where]
        self._fewest = 3 if is_local else 2
        """With fewer, none is lost: steps of a process alone are not noted."""
        self._steps, self.averages, self._pace = folder / "steps", folder / "averages", folder / "pace"
        self._steps.mkdir()
        self.averages.mkdir()
        self._pace.write_text(str(PACE_S))
        self._env = {
            **os.environ,
            "HVDTRAIN_ELASTIC_TOKEN": "soak",
            **(self._clocks.environment if self._clocks else {}),
        }
        self._env |= {"HVDTRAIN_TEST_STEP_S": str(self._pace), "HVDTRAIN_TEST_SAMPLES": str(self._steps)}
        if is_local:
            self._env["HVDTRAIN_TEST_AVERAGES"] = str(self.averages)
        self.job = self._start([*elastic, *self._train])
        self._joined: list[subprocess.Popen[bytes]] = []
        self._survived = 0
        """Events since the members last changed."""
        self._when_full = ""
        """The newest checkpoint when the disk was last full."""
        self.happened = Counter[str]()
        self.usage: list[Usage] = []
        """Of the oldest process, at each event."""
        self.generations: list[int] = []
        """Numbers of the generations at each event."""

    def _start(self, line: list[str]) -> "subprocess.Popen[bytes]":
        line = self._lab.command("lab1", line) if self._lab else line
        return subprocess.Popen(line, env=self._env, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True)

    @property
    def output(self) -> str:
        return (self.folder / "output.txt").read_text()

    def noted_samples(self) -> int:
        """Samples of the steps that all processes have made."""
        return sum(int(line) for path in self._steps.iterdir() for line in path.read_text().splitlines())

    def processes(self) -> list[psutil.Process]:
        """The processes that train or start, oldest first."""
        found = []
        for process in psutil.process_iter(["cmdline", "create_time", "status"]):
            line = process.info["cmdline"] or [""]
            trains = "python" in line[0] and str(self.run_dir) in line and "elastic" not in line
            if trains and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
        return sorted(found, key=lambda process: process.info["create_time"])

    def _members(self, processes: list[psutil.Process]) -> list[psutil.Process]:
        """Those that have trained beside others."""
        return [each for each in processes if (self._steps / f"{each.pid}.txt").exists()]

    def _is_on_second_host(self, members: list[psutil.Process]) -> bool:
        """Whether a cut is a loss."""
        namespace = f"net:[{Path('/run/netns/lab2').stat().st_ino}]"
        with contextlib.suppress(OSError):
            return any(os.readlink(f"/proc/{process.pid}/ns/net") == namespace for process in members)
        return False

    def _newest_checkpoint(self) -> str:
        return max((path.name for path in (self.run_dir / "checkpoints").glob("step-????????")), default="")

    def num_generations(self) -> int:
        return self.output.count("hvdtrain elastic: generation")

    def num_joined(self) -> int:
        """Processes that have joined those that trained."""
        return sum(int(number) for number in re.findall(r"generation \d+: .*, (\d+) of them new", self.output))

    def _wait(self, holds: Callable[[], bool], most_s: float, what: str) -> bool:
        """Waits for something that must happen; returns whether the job runs."""
        if not wait_until(lambda: holds() or self.job.poll() is not None, most_s):
            raise SystemExit(f"{what} within {most_s:g} s: {self.output[-3000:]}")
        return self.job.poll() is None

    def _trains_on(self, what: str) -> bool:
        """Waits until more samples are noted; False if the job has ended."""
        before = self._noted_bytes()
        return self._wait(lambda: self._noted_bytes() > before, 90, f"no step after {what}")

    def _noted_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._steps.iterdir())

    def event(self) -> bool:
        """Makes one event happen; False if the job has ended."""
        if not self._trains_on("an event"):
            return False
        time.sleep(self._random.uniform(0.0, 0.5))
        processes = self.processes()
        members = self._members(processes)
        if members and (used := surroundings.usage(members[0].pid)):
            self.usage.append(used)
            self.generations.append(self.num_generations())
        starting = len(processes) - len(members)
        has_room = len(processes) < MOST + MOST_STARTING and starting < MOST_STARTING
        if self._may_join and has_room and "join at " in self.output:
            port = self.output.partition("join at ")[2].split()[0]
            self._joined.append(self._start([*self._train, "--join", port]))
        if len(members) > self._fewest and self._changes:
            self._change(members)
        elif self._survivable and (self._survived < MOST_SURVIVED or not self._changes):
            self._survive(members)
        else:
            fewest = self._fewest
            return self._wait(lambda: len(self._members(self.processes())) > fewest, 180, "no process has joined")
        return self.job.poll() is None

    def _change(self, members: list[psutil.Process]) -> None:
        """Strikes one that is not the oldest, so that the members change."""
        kind = self._random.choices(list(self._changes), list(self._changes.values()))[0]
        if self._lab and self._random.random() < 0.2 and self._is_on_second_host(members):
            kind = "cut off"
        before = self.num_generations()
        if kind == "cut off":
            assert self._lab
            self._lab.cut("lab2")
            time.sleep(STALL_S + 3)
            self._lab.restore("lab2")
        else:
            victim = self._random.choice(members[1:])
            if not surroundings.send(victim.pid, SIGNALS[kind]):
                return
        self._wait(lambda: self.num_generations() > before, 60, f"no other members after {kind}")
        self.happened[kind] += 1
        self._survived = 0
        if kind == "stop" and victim.pid in [process.pid for process in self._joined]:
            victim.kill()  # The coordinator kills only what it has started.

    def _survive(self, members: list[psutil.Process]) -> None:
        kinds = dict(self._survivable)
        if len(kinds) > 1 and self._newest_checkpoint() == self._when_full:
            kinds.pop("full", None)  # Three failed checkpoints in succession end the job.
        kind = self._random.choices(list(kinds), list(kinds.values()))[0]
        pid = self._random.choice(members).pid if members else self.job.pid
        hit = True
        if kind == "pause":
            hit = surroundings.suspend(pid, self._random.uniform(0.1, 0.8))
        elif kind == "jump":
            seconds = int(self._random.choice([-1, 1]) * 10 ** self._random.uniform(0, 5.9365))
            assert self._clocks
            hit = self._clocks.jump(pid, seconds)
        elif kind == "cut":
            surroundings.cut_link(self._random.uniform(0.1, 0.8))
        else:
            assert self._disk
            self._when_full = self._newest_checkpoint()
            before = self.output.count("hvdtrain: ")
            hit = self._disk.fill_until(lambda: self.output.count("hvdtrain: ") > before, 3)
        self.happened[kind] += hit
        self._survived += 1

    def end(self) -> int:
        """Lets the few oldest processes complete the job; returns its exit code."""
        self._pace.unlink()
        for process in self.processes()[self._fewest - 1 :]:
            surroundings.send(process.pid, signal.SIGTERM)
        code = self.job.wait(1200)
        for process in self._joined:
            process.wait(60)
        return code

    def left_behind(self) -> list[str]:
        """What the job has left some seconds after its end."""
        ports_before = None if self._lab else self._ports_before
        return surroundings.left_behind(lambda: [each.pid for each in self.processes()], ports_before)

    def kill(self) -> None:
        for process in [self.job, *self._joined]:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes():
            process.kill()
        if self._disk:
            self._disk.close()


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
    cuts = soak.happened.get("cut off", 0)
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
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--steps", type=int, help=f"default: {STEPS_OF_AN_EVENT} for each event")
    parser.add_argument("--wait-free", action="store_true", help="by local SGD without waiting")
    parser.add_argument("more", nargs="*", help="options of the training, after --")
    parser.add_argument("--lab", action="store_true", help="on two hosts of launch/lab")
    arguments = parser.parse_args()
    if not arguments.lab:
        surroundings.leave_the_machine()
    steps = arguments.steps or STEPS_OF_AN_EVENT * arguments.events
    options = [*(WAIT_FREE if arguments.wait_free else ()), *arguments.more]
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        lab = stack.enter_context(Laboratory(2)) if arguments.lab else None
        soak = Soak(Path(name), steps, arguments.seed, lab, arguments.kinds, options, is_local=arguments.wait_free)
        try:
            while sum(soak.happened.values()) + soak.num_joined() < arguments.events and soak.event():
                pass
            code = soak.end()
            soak.happened["join"], soak.happened["leave"] = soak.num_joined(), soak.output.count("leaves: SIGTERM")
            left = soak.left_behind()
            found = summary(soak.run_dir)
            one = None if arguments.wait_free else train_alone(Path(name, "one"), steps, timeout_s=1200, options=SELDOM)
            is_wrong = compared(soak, found) if one is None else compared_with_one(soak.run_dir, one)
        except BaseException:
            print(soak.output[-8000:])
            raise
        finally:
            soak.kill()
        happened = dict(+soak.happened)
        print(f"{sum(happened.values())} events: {happened}; {soak.num_generations()} generations; exit code {code}")
        gained = surroundings.descriptors_gained(soak.usage)
        grown_mib = soak.usage[-1].memory_mib - soak.usage[0].memory_mib
        most = max(used.descriptors for used in soak.usage)
        print(f"oldest process: {soak.usage[0]} … {soak.usage[-1]}, most {most} descriptors")
        memory = {number: f"{used.memory_mib:.0f}" for number, used in zip(soak.generations, soak.usage, strict=True)}
        print("MiB at the last event of each generation:", *(f"{number}: {mib}" for number, mib in memory.items()))
        print(f"left: {', '.join(left) or 'nothing'}")
        wrong = bool(
            code != 0 or is_wrong or left or gained > surroundings.MOST_DESCRIPTORS or "terminate called" in soak.output
        )
        if wrong:
            print(soak.output[-8000:])
    worst = {"descriptors_gained": gained, "memory_gained_mib": round(grown_mib, 1)}
    mode = " ".join(["elastic", *options, *(["on two hosts"] if lab else [])])
    failure_results.add(mode, happened, arguments.seed, worst, runs=1, jobs=1, different=int(is_wrong))
    raise SystemExit(wrong)


if __name__ == "__main__":
    main()
