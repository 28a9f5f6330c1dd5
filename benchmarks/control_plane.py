"""The job watch with thousands of ranks: rank 0 is real and trains, the others are simulated on this machine.

    launch/run python benchmarks/control_plane.py                      # 2 to 4,096 ranks
    launch/run python benchmarks/control_plane.py --name before --package ../older    # another checkout's hvdtrain

Rank 0 makes compiled steps on one core; the other ranks, whose monitors and connections are the real ones, share the
other cores in a few processes. Measures, for each number of ranks: the time to connect all ranks; rank 0's steps in
short blocks with and without a job watch, alternately, each block with it compared with the two beside it; the
processor time of its monitor thread; its memory and descriptors; and the time until all ranks agree on a stop, until
all are disconnected at the end of a run, and until a lost rank, or 64 ranks lost together, are named and all other
ranks are ended. Saves results/control_plane.json; many_ranks_table.py prints it.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "single"))
from simulated_ranks import FirstRank, SimulatedRanks

from hvdtrain.fault_tolerance import channel, control_thread, monitor_thread
from hvdtrain.fault_tolerance.job_watch import JobWatch
from hvdtrain.fault_tolerance.peers import heartbeat_interval_s

RANKS_PER_HOST = 8
PROCESSES = 4
LOST_TOGETHER = 64
STALL_TIMEOUT_S = 600.0
_SETTLING_S = 1.0


def make_step() -> Callable[[], None]:
    """A compiled step of some milliseconds whose data stay in the core's own cache: other cores matter little."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    matrix = tf.eye(128)

    @tf.function
    def step() -> tf.Tensor:
        product = matrix
        for _ in tf.range(150):
            product = product @ matrix
        return tf.reduce_sum(product)

    return lambda: float(step()) and None


class Block(NamedTuple):
    """Means over the steps of a block, which hold their part of what the monitor thread does now and then."""

    step_s: float
    cpu_s: float
    """Of this process's threads, for each step: another process on this core does not count."""


def train(step: Callable[[], None], watch: JobWatch | None, seconds: float) -> Block:
    """Makes steps as the training loop does."""
    steps, began, cpu_s = 0, time.perf_counter(), time.process_time()
    until = began + seconds
    while time.perf_counter() < until:
        step()
        if watch is not None:
            watch.check()
            watch.heartbeat("training", steps)
        steps += 1
    return Block((time.perf_counter() - began) / steps, (time.process_time() - cpu_s) / steps)


def monitor_cpu_s() -> float:
    """The processor time of the running monitor thread."""
    (thread,) = (each for each in threading.enumerate() if each.name == "hvdtrain-monitor")
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


class Watched:
    """Suspends a job watch, so that steps are as without one: its monitor thread sleeps, and no rank sends anything."""

    def __init__(self, watch: JobWatch, job: "Job"):
        self._job = job
        self._runs = threading.Event()
        self._runs.set()
        self._monitor: Any = watch.monitor
        self.heartbeat_cpu_s = 0.0
        """The longest processor time to send a heartbeat to all ranks."""
        self._poll, self._send = self._monitor.poll, self._monitor._send_heartbeat
        self._monitor.poll, self._monitor._send_heartbeat = self.poll, self.send

    def poll(self) -> None:
        self._runs.wait()
        self._poll()

    def send(self) -> None:
        began = time.thread_time()
        self._send()
        self.heartbeat_cpu_s = max(self.heartbeat_cpu_s, time.thread_time() - began)

    def suspend(self) -> None:
        self._runs.clear()
        self._job.others.tell("suspend")

    def resume(self) -> None:
        self._job.others.tell("resume")
        self._runs.set()


class Job:
    """A job of one real and many simulated ranks."""

    def __init__(self, size: int):
        self.hosts = [f"host{rank // RANKS_PER_HOST}" for rank in range(size)]
        self.others = SimulatedRanks(self.hosts, processes=min(PROCESSES, size - 1))
        for process in self.others.processes:
            psutil.Process(process.pid).cpu_affinity(other_cores())

    def open(self) -> tuple[JobWatch, dict[str, float]]:
        began: list[float] = []

        def connect(endpoint: Any) -> None:
            began.append(time.monotonic())
            self.others.tell("connect", endpoint, 60.0)

        first = FirstRank(self.hosts, connect, lambda: sum(self.others.answers()))
        watch = JobWatch(first, stall_timeout_s=STALL_TIMEOUT_S)
        before = psutil.Process().memory_info().rss
        watch.start()
        connected_s = time.monotonic() - began[0]
        memory = psutil.Process().memory_info().rss - before
        return watch, {"connect_s": connected_s, "memory_mb": memory / 1e6}

    def agree_on_a_stop(self, watch: JobWatch, step: Callable[[], None]) -> float:
        """Seconds from the request of a random rank until all ranks know where to stop."""
        requested = min(self.others.ask("stop", random.randrange(1, len(self.hosts))))
        while not watch.check():
            step()
        found = self.others.ask("decisions")
        while sum(count for count, _, _ in found) < len(self.hosts) - 1:
            time.sleep(0.02)
            found = self.others.ask("decisions")
        assert len(set().union(*(checks for _, checks, _ in found))) == 1
        return max(at for _, _, at in found) - requested

    def wait_until_left(self) -> float:
        """Waits until no simulated rank is connected; returns when the last one ended."""
        until = time.monotonic() + 30
        found = self.others.ask("left")
        while num_left := sum(count for count, _, _ in found):
            if time.monotonic() > until:
                raise RuntimeError(f"{num_left} ranks are still connected")
            time.sleep(0.02)
            found = self.others.ask("left")
        return max(at for _, _, at in found)


def other_cores() -> list[int]:
    cores = sorted(os.sched_getaffinity(0))
    return cores[1:] or cores


def step_ratios(watch: JobWatch, watched: Watched, step: Callable[[], None], pairs: int, seconds: float) -> Any:
    """By name, a number for each block with the job watch: its steps relative to the means of the blocks beside it."""
    found: dict[str, list[float]] = {"step_ratio": [], "step_cpu_ratio": [], "step_ms": [], "monitor_cpu_share": []}
    watched.suspend()
    before = train(step, None, seconds)
    for _ in range(pairs):
        watched.resume()
        cpu_s, began = monitor_cpu_s(), time.perf_counter()
        within = train(step, watch, seconds)
        found["monitor_cpu_share"].append((monitor_cpu_s() - cpu_s) / (time.perf_counter() - began))
        watched.suspend()
        after = train(step, None, seconds)
        found["step_ratio"].append(2 * within.step_s / (before.step_s + after.step_s))
        found["step_cpu_ratio"].append(2 * within.cpu_s / (before.cpu_s + after.cpu_s))
        found["step_ms"].append(1000 * after.step_s)
        before = after
    watched.resume()
    return found


def measure(size: int, rounds: int, pairs: int, seconds: float) -> dict[str, Any]:
    job = Job(size)
    # Before TensorFlow starts threads of its own.
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    step = make_step()
    train(step, None, 1.0)
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        watch, opened = job.open()
        watched = Watched(watch, job)
        train(step, watch, _SETTLING_S)
        rows = step_ratios(watch, watched, step, pairs, seconds)
        row = {**opened, "descriptors": len(os.listdir("/proc/self/fd")), "heartbeat_cpu_s": watched.heartbeat_cpu_s}
        train(step, watch, _SETTLING_S)
        row["stop_s"] = job.agree_on_a_stop(watch, step)
        began = time.monotonic()
        watch.close()
        row["close_s"] = time.monotonic() - began
        row["all_left_s"] = job.wait_until_left() - began
        for name, values in [*rows.items(), *((name, [value]) for name, value in row.items())]:
            found.setdefault(name, []).extend(values)
        print(size, {name: round(statistics.median(values), 4) for name, values in found.items()}, flush=True)
    job.others.close()
    quartiles = {name: statistics.quantiles(values, n=4) for name, values in found.items()}
    rounded = {name: [round(value, 6) for value in values] for name, values in found.items()}
    interval_s = heartbeat_interval_s(size, STALL_TIMEOUT_S)
    fixed = {"heartbeat_interval_s": interval_s, "connect_limit_s": channel.connect_timeout_s(size)}
    return fixed | {"quartiles": quartiles, "all_rounds": rounded}


def measure_loss(size: int, num_lost: int) -> dict[str, Any]:
    """Runs in a process of its own, which the job watch ends; prints what happened before that."""
    job = Job(size)
    # Before TensorFlow starts threads of its own.
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    step = make_step()
    watch, _ = job.open()
    train(step, watch, _SETTLING_S)
    at: dict[str, float] = {}
    texts: list[str] = []

    def end(code: int) -> None:
        # In place of os._exit, on the monitor thread: by then all others have been told.
        at["ended"] = time.monotonic()
        threading.Event().wait()

    def write(text: str) -> None:
        at["named"] = time.monotonic()
        texts.append(text)

    control_thread.os = Replaced(control_thread.os, _exit=end)
    monitor_thread.write = write
    first = RANKS_PER_HOST * (size // RANKS_PER_HOST // 2) or 1
    lost_at = min(job.others.ask("lose", list(range(first, first + num_lost))))
    while "ended" not in at:
        step()
    last = job.wait_until_left()
    codes = [code for _, each, _ in job.others.ask("left") for code in each.values()]
    found = {"named_s": at["named"] - lost_at, "ended_s": at["ended"] - lost_at, "all_ended_s": last - lost_at}
    found |= {"num_told": len(codes), "codes": sorted(set(codes)), "text": texts[0]}
    print(json.dumps(found), flush=True)
    job.others.close()
    os._exit(0)


class Replaced:
    """A module with some of its names replaced."""

    def __init__(self, module: Any, **names: Any):
        self._module, self._names = module, names

    def __getattr__(self, name: str) -> Any:
        return self._names.get(name) or getattr(self._module, name)


def run(package: Path | None, *arguments: str) -> dict[str, Any]:
    """The last line that this script prints in a process of its own."""
    line = [sys.executable, __file__, *arguments]
    environment = dict(os.environ) | ({"PYTHONPATH": str(package.resolve())} if package else {})
    done = subprocess.run(line, capture_output=True, text=True, timeout=900, check=False, env=environment)
    if done.returncode != 0:
        print(done.stderr, file=sys.stderr)
        return {"failed": done.returncode, "error": done.stderr.splitlines()[-1]}
    *shown, last = done.stdout.splitlines()
    print("\n".join(shown), flush=True)
    return json.loads(last)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 16, 64, 256, 1024, 4096])
    parser.add_argument("--rounds", type=int, default=4, help="how often the ranks connect")
    parser.add_argument("--pairs", type=int, default=20, help="blocks of steps with the job watch in each round")
    parser.add_argument("--seconds", type=float, default=1.0, help="duration of a block of steps")
    parser.add_argument("--name", default="after", help="under which the results are saved")
    parser.add_argument(
        "--package",
        type=Path,
        help="a checkout with the same control_thread.py, whose hvdtrain is measured (default: this one)",
    )
    parser.add_argument("--part", choices=["steps", "loss"], help=argparse.SUPPRESS)
    parser.add_argument("--lost", type=int, default=1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part == "steps":
        print(json.dumps(measure(options.ranks[0], options.rounds, options.pairs, options.seconds)))
        return
    if options.part == "loss":
        measure_loss(options.ranks[0], options.lost)
    kept = HERE / "results" / "control_plane.json"
    for size in options.ranks:
        shared = ["--ranks", str(size), "--rounds", str(options.rounds)]
        shared += ["--pairs", str(options.pairs), "--seconds", str(options.seconds)]
        row: dict[str, Any] = {"load": os.getloadavg()[0], "lost": {}}
        row["steps"] = run(options.package, "--part", "steps", *shared)
        for num_lost in [1, *([LOST_TOGETHER] if size > 2 * LOST_TOGETHER else [])]:
            row["lost"][num_lost] = run(options.package, "--part", "loss", "--lost", str(num_lost), *shared)
            print(size, num_lost, "lost:", row["lost"][num_lost], flush=True)
        results = json.loads(kept.read_text()) if kept.exists() else {}
        results.setdefault(options.name, {})[str(size)] = row
        kept.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
