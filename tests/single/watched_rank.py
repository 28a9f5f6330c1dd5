"""One rank of a job without Horovod: ``python watched_rank.py SCENARIO RANK SIZE FOLDER STALL_TIMEOUT``.

The collectives exchange files, so that neither Horovod nor a launcher is needed. Creating the file ``later`` in the
folder advances the ranks' clocks by ten seconds.
"""

import atexit
import ctypes
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from made_up_jobs import wait_until

from hvdtrain.errors import StoppedEarly
from hvdtrain.fault_tolerance.job_watch import JobWatch
from hvdtrain.fault_tolerance.shutdown import end_job
from hvdtrain.system import processes, transfers


class FileCollectives:
    """Collectives through the files of a folder."""

    def __init__(self, rank: int, size: int, folder: Path):
        self.rank = rank
        self.size = size
        self.folder = folder
        self._calls = 0

    def allgather(self, value: Any) -> list[Any]:
        self._calls += 1
        own = self.folder / f"{self._calls}.{self.rank}"
        own.with_suffix(f".{self.rank}-new").write_bytes(pickle.dumps(value))
        own.with_suffix(f".{self.rank}-new").rename(own)
        paths = [self.folder / f"{self._calls}.{rank}" for rank in range(self.size)]
        wait_until(lambda: all(path.exists() for path in paths), timeout_s=60)
        return [pickle.loads(path.read_bytes()) for path in paths]

    def sum(self, arrays: list[Any]) -> list[Any]:
        return [sum(each) for each in zip(*self.allgather(arrays), strict=True)]

    def barrier(self) -> None:
        self.allgather(None)


class Mutex:
    """Blocks in C, where Python runs no signal handler and no signal interrupts, as in a reduction."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._memory = ctypes.create_string_buffer(128)
        self._library.pthread_mutex_lock(self._memory)

    def wait(self) -> None:
        self._library.pthread_mutex_lock(self._memory)

    def release(self) -> None:
        self._library.pthread_mutex_unlock(self._memory)


def say(text: str) -> None:
    print(text, flush=True)


def wait_for_others() -> None:
    Mutex().wait()


def is_stuck_here() -> None:
    Mutex().wait()


def wait_for_heartbeats(watch: JobWatch, collectives: FileCollectives, number: Callable[[int], int]) -> None:
    """Waits until all ranks have received the latest heartbeats of the ranks that they are connected to."""
    peers = list(watch.monitor.peers.values())
    wait_until(lambda: all(peer.position.heartbeats == number(peer.rank) for peer in peers))
    collectives.barrier()


def training(watch: JobWatch, collectives: FileCollectives) -> None:
    """All ranks train until the stop."""
    say("ready")
    for step in range(10_000):
        watch.heartbeat("training", step)
        if watch.check():
            say(f"stops at {step}: {watch.stop_reason}")
            raise StoppedEarly(f"stopped at step {step}; resume to continue")
        collectives.barrier()


def stopped_in_c(watch: JobWatch, collectives: FileCollectives) -> None:
    """Rank 0's main thread does not return from C before the stop is requested."""
    mutex = Mutex()

    def release_when_stop_is_requested() -> None:
        wait_until(lambda: watch.stop_requested, timeout_s=60)
        say(f"received {watch.stop_reason}")
        mutex.release()

    threading.Thread(target=release_when_stop_is_requested).start()
    say("ready")
    if collectives.rank == 0:
        mutex.wait()
    while not watch.check():
        collectives.barrier()
    say("stops")


def stopping_slowly(watch: JobWatch, collectives: FileCollectives) -> None:
    """The ranks receive the stop request but reach no check."""
    say("ready")
    wait_until(lambda: watch.stop_requested, timeout_s=60)
    say(f"received {watch.stop_reason}")
    wait_for_others()


def waiting(watch: JobWatch, collectives: FileCollectives) -> None:
    """All ranks have made the same progress and wait."""
    watch.heartbeat("evaluation", 120)
    wait_for_heartbeats(watch, collectives, lambda rank: 1)
    say("ready")
    wait_for_others()


def rank_0_is_ahead(watch: JobWatch, collectives: FileCollectives, ahead: int = 0) -> None:
    """One rank has begun one step more than the other."""
    watch.heartbeat("training", 120)
    if collectives.rank == ahead:
        watch.heartbeat("training", 121)
    wait_for_heartbeats(watch, collectives, lambda rank: 2 if rank == ahead else 1)
    say("ready")
    wait_for_others()


def rank_1_is_ahead(watch: JobWatch, collectives: FileCollectives) -> None:
    """As before, with the ranks exchanged."""
    rank_0_is_ahead(watch, collectives, ahead=1)


def progressing(watch: JobWatch, collectives: FileCollectives) -> None:
    """The ranks make progress until the file ``finish`` exists, and answer each file ``pingN``."""
    say("ready")
    step = pings = 0
    while not (collectives.folder / "finish").exists():
        watch.heartbeat("training", step)
        step += 1
        if (collectives.folder / f"ping{pings}").exists():
            say(f"pong {pings}")
            pings += 1
        time.sleep(0.02)


def hung(watch: JobWatch, collectives: FileCollectives) -> None:
    """Rank 1 hangs in its second step."""
    for step in (1, 2):
        watch.heartbeat("training", step)
    if collectives.rank == 1:
        is_stuck_here()
    watch.heartbeat("training", 3)
    wait_for_others()


def hung_alike(watch: JobWatch, collectives: FileCollectives) -> None:
    """Rank 1 hangs, but its progress is the same as that of the others."""
    watch.heartbeat("training", 7)
    if collectives.rank == 1:
        is_stuck_here()
    wait_for_others()


def one_progresses(watch: JobWatch, collectives: FileCollectives) -> None:
    """Rank 1 takes longer than the timeout and reports progress, while the others wait."""
    for step in range(10 if collectives.rank == 1 else 0):
        watch.heartbeat("evaluation", step)
        time.sleep(0.1)
    collectives.barrier()


def one_transfers(watch: JobWatch, collectives: FileCollectives) -> None:
    """Rank 0 moves a file for longer than the timeout, while the others wait."""
    for _ in range(10 if collectives.rank == 0 else 0):
        transfers.note()
        time.sleep(0.1)
    collectives.barrier()


def fails(watch: JobWatch, collectives: FileCollectives) -> None:
    """Only the last rank raises an error."""
    watch.heartbeat("training", 4)
    collectives.barrier()
    if collectives.rank == collectives.size - 1:
        raise ValueError("cursed")
    wait_for_others()


def secondary_error(watch: JobWatch, collectives: FileCollectives) -> None:
    """A rank is lost, and Horovod's operations fail on rank 0 before its monitor thread detects the loss."""
    wait = watch.wait_for_cause
    watch.wait_for_cause = lambda timeout_s: (say("waits for the cause"), wait(timeout_s))
    if collectives.rank == 0:
        raise RuntimeError("node HorovodAllreduce: Horovod has been shut down")
    wait_for_others()


def primary_error(watch: JobWatch, collectives: FileCollectives) -> None:
    """An error that looks like a secondary one is the cause."""
    if collectives.rank == 0:
        raise RuntimeError("node HorovodAllreduce: Mismatched shapes")
    wait_for_others()


def exit_actions(watch: JobWatch, collectives: FileCollectives) -> None:
    """The ranks have an action that fails, one that writes a file, and one that hangs."""
    folder = collectives.folder

    def write_file() -> None:
        time.sleep(0.3)
        (folder / f"finished by {collectives.rank}").touch()

    def fails() -> None:
        raise OSError("disk full")

    for action in (fails, write_file, wait_for_others):
        watch.before_exit(action)
    say("ready")
    wait_for_others()


def forked(watch: JobWatch, collectives: FileCollectives) -> None:
    """Rank 1 has a child that outlives it, and that SIGTERM must end."""
    if collectives.rank == 1:
        child = os.fork()
        if child == 0:
            while True:
                signal.pause()
        say(f"child {child}")
    say("ready")
    wait_for_others()


def ending_slowly(watch: JobWatch, collectives: FileCollectives) -> None:
    """All ranks stop; rank 1's process takes a while to end."""

    def end_slowly() -> None:
        say("has ended")
        wait_until((collectives.folder / "finish").exists)

    if collectives.rank == 1:
        atexit.register(end_slowly)
    raise StoppedEarly("stopped")


def orderly(watch: JobWatch, collectives: FileCollectives) -> None:
    """The last rank leaves first, then rank 0, then the others; each waits for the end of the previous process."""
    pids = collectives.allgather(os.getpid())
    say("ready")
    if collectives.rank != collectives.size - 1:
        wait_until(lambda: not processes.is_running(pids[collectives.rank - 1]))


def main() -> None:
    scenario, rank, size, folder, stall_timeout = sys.argv[1:]
    collectives = FileCollectives(int(rank), int(size), Path(folder))
    later = Path(folder) / "later"
    clock = lambda: time.monotonic() + (10.0 if later.exists() else 0.0)
    watch = JobWatch(collectives, stall_timeout_s=float(stall_timeout), clock=clock)
    with watch:
        try:
            globals()[scenario](watch, collectives)
        except Exception as error:
            end_job(error, collectives, 4, watch)


if __name__ == "__main__":
    main()
