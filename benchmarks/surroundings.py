"""A network, a disk and wall clocks for the processes of a job, which can be made to fail. Needs root.

They are this process's own (network and mount namespaces), so that nothing else on the machine notices a failure, and
whatever is left in them after a job is the job's.
"""

import contextlib
import ctypes
import os
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import psutil
from launcher import listening

_NEW_MOUNTS, _NEW_NETWORK = 0x00020000, 0x40000000
_SHARED_MEMORY = Path("/dev/shm")


def leave_the_machine() -> None:
    """Gives this process, and all that it starts from now on, a loopback interface and shared memory of their own.

    Raises:
        PermissionError: this process is not root.
    """
    if ctypes.CDLL(None).unshare(_NEW_MOUNTS | _NEW_NETWORK):
        raise PermissionError("private networks and mounts need root")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(_SHARED_MEMORY)], check=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def cut_link(seconds: float) -> None:
    """Takes the loopback interface down for a time: what is sent meanwhile is lost, and sent again by TCP."""
    subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
    time.sleep(seconds)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def suspend(pid: int, seconds: float) -> bool:
    """SIGSTOP, and SIGCONT after a time; returns whether the process was there and stood still."""
    try:
        process = psutil.Process(pid)
        process.suspend()
        time.sleep(seconds)
        stood = process.status() == psutil.STATUS_STOPPED
        process.resume()
    except psutil.NoSuchProcess:
        return False
    return stood


class Disk:
    """A small file system that can be filled."""

    def __init__(self, folder: Path):
        self.folder = folder
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(folder)], check=True)

    def fill_until(self, is_noticed: Callable[[], bool], most_s: float) -> bool:
        """Fills it until it has been noticed, or for so long; returns whether it was."""
        filler = self.folder / "filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(1 << 16)):
                pass
        noticed = wait_until(is_noticed, most_s)
        filler.unlink()
        return noticed

    def close(self) -> None:
        subprocess.run(["umount", "--lazy", str(self.folder)], check=True)


class Clocks:
    """The wall clocks of processes, each of which can jump.

    Args:
        folder: for the library that is preloaded, and a file of each process.
    """

    def __init__(self, folder: Path):
        self._folder = folder / "clocks"
        self._folder.mkdir()
        library, source = folder / "shifted_clock.so", Path(__file__).with_name("shifted_clock.c")
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
        self.environment = {"LD_PRELOAD": str(library), "SHIFTED_CLOCKS": str(self._folder)}

    def jump(self, pid: int, seconds: int, most_s: float = 5.0) -> bool:
        """Moves the clock of a process; returns whether the process has read it since."""
        try:
            with (self._folder / str(pid)).open("r+b", buffering=0) as file:
                file.write(struct.pack("qq", seconds, 0))
                return wait_until(lambda: struct.unpack("q", os.pread(file.fileno(), 8, 8))[0] > 0, most_s)
        except FileNotFoundError:
            return False


class Usage(NamedTuple):
    """What a process holds."""

    descriptors: int
    memory_mib: float


def usage(pid: int) -> Usage | None:
    """What a process holds; None if it has ended."""
    try:
        process = psutil.Process(pid)
        return Usage(process.num_fds(), process.memory_info().rss / 2**20)
    except psutil.Error:
        return None


MOST_DESCRIPTORS = 2
"""How many a process may gain in all: files that are opened once, such as that of the first evaluation's events."""


def descriptors_gained(used: list[Usage], look: int = 3) -> int:
    """By how many descriptors the least of the last exceeds the most of the first; some are open only for a moment."""
    counts = [each.descriptors for each in used]
    return max(0, min(counts[-look:]) - max(counts[:look])) if len(counts) >= 2 * look else 0


def left_behind(
    processes: Callable[[], Iterable[int]], ports_before: set[int] | None, most_s: float = 5.0
) -> list[str]:
    """Processes, ports and shared memory that a job has left some seconds after its end.

    Args:
        processes: finds those of the job.
        ports_before: those that others listen on; None: the job was not alone in its network, and ports are not looked
            at, nor is shared memory.
    """

    def found() -> list[str]:
        left = [f"process {pid}" for pid in processes()]
        if ports_before is not None:
            left += [f"port {port}" for port in listening().keys() - ports_before]
            left += map(str, _SHARED_MEMORY.iterdir())
        return left

    wait_until(lambda: not found(), most_s)
    return found()


def wait_until(holds: Callable[[], bool], most_s: float) -> bool:
    """Waits for something, at most so long; returns whether it has come true."""
    until_s = time.monotonic() + most_s
    while not holds():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.02)
    return True


def send(pid: int, number: signal.Signals) -> bool:
    """Sends a signal; returns whether the process was there and running."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return False
    return True
