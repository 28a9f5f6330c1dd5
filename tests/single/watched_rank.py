"""One rank of a made-up job: ``python watched_rank.py SCENARIO RANK SIZE FOLDER STALL_TIMEOUT``.

What ranks do together goes through files, so that neither Horovod nor a launcher is needed.
"""

import ctypes
import os
import pickle
import sys
import threading
import time
from pathlib import Path
from typing import Any

from hvdtrain.errors import StoppedEarly
from hvdtrain.failure import JobWatch, end_job


class FileCollectives:
    """Gathers through files of a folder."""

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
        while not all(path.exists() for path in paths):
            time.sleep(0.002)
        return [pickle.loads(path.read_bytes()) for path in paths]

    def sum(self, arrays: list[Any]) -> list[Any]:
        return [sum(each) for each in zip(*self.allgather(arrays), strict=True)]

    def barrier(self) -> None:
        self.allgather(None)


class Mutex:
    """Blocks in C, where no signal is handled and none interrupts, as in a reduction."""

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


def training(watch: JobWatch, collectives: FileCollectives) -> None:
    """Steps in step, until told to stop."""
    say("ready")
    for step in range(10_000):
        watch.beat("training", step)
        if watch.check():
            say(f"stops at {step}: {watch.stop_reason}")
            raise StoppedEarly(f"stopped at step {step}; resume to go on")
        collectives.barrier()


def stopped_in_c(watch: JobWatch, collectives: FileCollectives) -> None:
    """Rank 0's main thread does not come back from C before the stop is known."""
    mutex = Mutex()

    def release_when_stop_is_known() -> None:
        while not watch.stop_is_coming:
            time.sleep(0.01)
        say(f"heard of {watch.stop_reason}")
        mutex.release()

    threading.Thread(target=release_when_stop_is_known).start()
    say("ready")
    if collectives.rank == 0:
        mutex.wait()
    while not watch.check():
        collectives.barrier()
    say("stops")


def stopping_slowly(watch: JobWatch, collectives: FileCollectives) -> None:
    """Ranks that take long to stop."""
    say("ready")
    while not watch.stop_is_coming:
        time.sleep(0.01)
    say(f"heard of {watch.stop_reason}")
    time.sleep(60)


def waiting(watch: JobWatch, collectives: FileCollectives) -> None:
    """All ranks have come equally far and wait."""
    watch.beat("evaluation", 120)
    time.sleep(0.2 + min(1.0, float(sys.argv[-1]) / 4 or 1.0))  # Until rank 0 has heard of it, and tells the others.
    say("ready")
    wait_for_others()


def rank_0_is_ahead(watch: JobWatch, collectives: FileCollectives, ahead: int = 0) -> None:
    """One rank has begun a step more than the other."""
    watch.beat("training", 120)
    if collectives.rank == ahead:
        watch.beat("training", 121)
    time.sleep(1.2)  # Until rank 0 has heard of it.
    say("ready")
    wait_for_others()


def rank_1_is_ahead(watch: JobWatch, collectives: FileCollectives) -> None:
    """The same of the other."""
    rank_0_is_ahead(watch, collectives, ahead=1)


def beating(watch: JobWatch, collectives: FileCollectives) -> None:
    """Ranks that move on for 2 s."""
    say("ready")
    for step in range(40):
        watch.beat("training", step)
        time.sleep(0.05)


def hung(watch: JobWatch, collectives: FileCollectives) -> None:
    """Rank 1 does not come out of its second step."""
    for step in (1, 2):
        watch.beat("training", step)
    if collectives.rank == 1:
        is_stuck_here()
    watch.beat("training", 3)
    wait_for_others()


def hung_alike(watch: JobWatch, collectives: FileCollectives) -> None:
    """Rank 1 is stuck, but nobody can know."""
    watch.beat("training", 7)
    if collectives.rank == 1:
        is_stuck_here()
    wait_for_others()


def one_beats(watch: JobWatch, collectives: FileCollectives) -> None:
    """Rank 1 takes long, and says so, while the others wait."""
    for step in range(15 if collectives.rank == 1 else 0):
        watch.beat("evaluation", step)
        time.sleep(0.1)
    collectives.barrier()


def fails(watch: JobWatch, collectives: FileCollectives) -> None:
    """The last rank alone meets an error."""
    watch.beat("training", 4)
    collectives.barrier()
    if collectives.rank == collectives.size - 1:
        raise ValueError("cursed")
    wait_for_others()


def echo(watch: JobWatch, collectives: FileCollectives) -> None:
    """A rank is lost, and Horovod's operations fail on rank 0 before its control thread knows."""
    say("ready")
    if collectives.rank == 0:
        while not (collectives.folder / "lost").exists():
            time.sleep(0.01)
        raise RuntimeError("node HorovodAllreduce: Horovod has been shut down")
    wait_for_others()


def echo_without_cause(watch: JobWatch, collectives: FileCollectives) -> None:
    """What sounds like an echo is the cause."""
    if collectives.rank == 0:
        raise RuntimeError("node HorovodAllreduce: Mismatched shapes")
    wait_for_others()


def last_work(watch: JobWatch, collectives: FileCollectives) -> None:
    """Rank 0 has a file to finish, and then something that hangs."""
    folder = collectives.folder

    def finish_file() -> None:
        time.sleep(1.0)
        (folder / f"finished by {collectives.rank}").touch()

    def fails() -> None:
        raise OSError("disk full")

    for action in (fails, finish_file, wait_for_others):
        watch.before_end(action)
    say("ready")
    wait_for_others()


def forked(watch: JobWatch, collectives: FileCollectives) -> None:
    """Rank 1 has a child that outlives it, and that SIGTERM has to end."""
    if collectives.rank == 1:
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        say(f"child {child}")
    say("ready")
    wait_for_others()


def orderly(watch: JobWatch, collectives: FileCollectives) -> None:
    """Ranks leave one after the other, each with its process."""
    say("ready")
    time.sleep(0.4 * ((collectives.rank + 1) % collectives.size))


def main() -> None:
    scenario, rank, size, folder, stall_timeout = sys.argv[1:]
    collectives = FileCollectives(int(rank), int(size), Path(folder))
    watch = JobWatch(collectives, stall_timeout_s=float(stall_timeout))
    with watch:
        try:
            globals()[scenario](watch, collectives)
        except Exception as error:
            end_job(error, collectives, 4, watch)


if __name__ == "__main__":
    main()
