"""Jobs of a few ranks without Horovod: as processes, which can receive signals, and as threads of one process."""

import dataclasses
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RANK = Path(__file__).with_name("watched_rank.py")


def wait_until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Waits for a condition that another thread or process fulfils."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition was not fulfilled in time"
        time.sleep(0.001)


@dataclasses.dataclass(frozen=True)
class Ended:
    """The exit code and output of a rank that has ended."""

    code: int
    output: str
    errors: str


class Job:
    """A job whose ranks are processes that run a scenario of watched_rank.py."""

    def __init__(self, scenario: str, size: int, folder: Path, stall_timeout_s: float):
        self.folder = folder
        self.ranks = [
            subprocess.Popen(
                [sys.executable, RANK, scenario, str(rank), str(size), folder, str(stall_timeout_s)],
                stdout=subprocess.PIPE,
                stderr=(folder / f"stderr.{rank}").open("w"),
                text=True,
            )
            for rank in range(size)
        ]

    def wait_for(self, text: str, *ranks: int) -> list[str]:
        """Returns the first line with this text of each of the ranks (default: all)."""
        outputs = [self.ranks[rank].stdout for rank in ranks or range(len(self.ranks))]
        return [next(line for line in output if text in line) for output in outputs if output is not None]

    def ended(self, within_s: float, *ranks: int) -> list[Ended]:
        """Returns the results of the ranks (default: all), which must end within this time."""
        until = time.monotonic() + within_s
        found = []
        for rank in ranks or range(len(self.ranks)):
            process = self.ranks[rank]
            output, _ = process.communicate(timeout=max(0.01, until - time.monotonic()))
            found.append(Ended(process.returncode, output, (self.folder / f"stderr.{rank}").read_text()))
        return found


class ThreadCollectives:
    """Collectives between threads."""

    def __init__(self, rank: int, values: list[Any], barrier: threading.Barrier):
        self.rank = rank
        self.size = len(values)
        self._values = values
        self._barrier = barrier

    def allgather(self, value: Any) -> list[Any]:
        self._values[self.rank] = value
        self._barrier.wait(20)
        values = list(self._values)
        self._barrier.wait(20)
        return values

    def sum(self, arrays: list[Any]) -> list[Any]:
        return [sum(each) for each in zip(*self.allgather(arrays), strict=True)]

    def alltoall(self, pieces: list[Any]) -> list[Any]:
        return [each[self.rank] for each in self.allgather(list(pieces))]

    def barrier(self) -> None:
        self._barrier.wait(20)


def on_threads(size: int, run: Any, make: Any = ThreadCollectives) -> list[Any]:
    """Runs a function on one thread per rank; returns each rank's result or error."""
    shared: list[Any] = [None] * size
    barrier = threading.Barrier(size)
    results: list[Any] = ["did not end"] * size

    def run_rank(rank: int) -> None:
        try:
            results[rank] = run(make(rank, shared, barrier))
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run_rank, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(25)
    return results
