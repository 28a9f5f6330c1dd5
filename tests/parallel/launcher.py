"""Starts real jobs for the tests, with a timeout, and checks exit codes and the number of executed tests."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent.parent
LOG_TAIL_LINES = 60
_PREFIX = "hvdtrain: "
# Parameters of a test that belong to the long tier.
LONG = partial(pytest.param, marks=pytest.mark.long)

LAUNCHERS = {
    # As root, and with more ranks than cores: both are normal on a test machine.
    "mpirun": ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np"],
    "horovodrun": ["horovodrun", "-np"],
    "horovodrun --gloo": ["horovodrun", "--gloo", "-np"],
}


@dataclasses.dataclass(frozen=True)
class Finished:
    """A job that has ended."""

    code: int
    output: str

    @property
    def messages(self) -> list[str]:
        """The messages of hvdtrain about errors and stops, without the tags of launchers."""
        # Also within a line: Horovod writes its lines in pieces, and ours may come between them.
        return [line[line.index(_PREFIX) :] for line in self.output.splitlines() if _PREFIX in line]

    @property
    def only_message(self) -> str:
        """The message; fails the test unless there is exactly one."""
        assert len(self.messages) == 1, self.output
        return self.messages[0]


class Job:
    """A running job."""

    def __init__(self, command: list[str], *, ranks: int, launcher: str = "mpirun", cwd: Path = ROOT):
        # All processes of the job have it in their environment, whatever process group the launcher puts them into.
        self._mark = f"HVDTRAIN_TEST_JOB={uuid.uuid4().hex}"
        name, _, value = self._mark.partition("=")
        self._launcher = subprocess.Popen(
            [*LAUNCHERS[launcher], str(ranks), *command] if launcher else command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd=cwd,
            env={**os.environ, "PYTHONUNBUFFERED": "1", name: value},
            start_new_session=True,
        )
        # Read on a thread: otherwise the job blocks when the pipe is full.
        self._output: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._launcher.stdout is not None
        self._output += self._launcher.stdout

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the launcher."""
        self._launcher.send_signal(number)

    @property
    def is_running(self) -> bool:
        """Whether the launcher is running."""
        return self._launcher.poll() is None

    @property
    def output(self) -> str:
        """What the job has printed so far."""
        return "".join(self._output)

    def wait_for(self, text: str, timeout_s: float = 60.0) -> None:
        """Waits until the job has printed a text."""
        until_s = time.monotonic() + timeout_s
        while text not in self.output:
            assert time.monotonic() < until_s, f"the job never printed {text!r}. Its output:\n{_tail(self.output)}"
            assert self.is_running, self.output
            time.sleep(0.05)

    def processes(self) -> dict[int, dict[str, str]]:
        """The environments of the job's processes, by process id."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                entries = (folder / "environ").read_text(errors="replace").split("\0")
                zombie = (folder / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            except OSError:
                continue
            if self._mark in entries and not zombie:
                found[int(folder.name)] = dict(entry.split("=", 1) for entry in entries if "=" in entry)
        return found

    def rank(self, number: int) -> int:
        """Waits for the process of a rank; returns its process id."""
        while True:
            for pid, environment in self.processes().items():
                rank = environment.get("OMPI_COMM_WORLD_RANK", environment.get("HOROVOD_RANK"))
                with contextlib.suppress(OSError):  # It has ended meanwhile.
                    if rank == str(number) and "python" in Path(f"/proc/{pid}/comm").read_text():
                        return pid
            assert self._launcher.poll() is None, "the job has ended"
            time.sleep(0.05)

    def ports(self) -> set[int]:
        """The ports on which the job's processes listen."""
        sockets = set()
        for pid in self.processes():
            for link in Path(f"/proc/{pid}/fd").glob("*"):
                with contextlib.suppress(OSError):
                    sockets.add(str(link.readlink()))
        return {port for port, inode in listening().items() if f"socket:[{inode}]" in sockets}

    def end(self, timeout_s: float) -> Finished:
        """Waits until the job has ended; kills it and fails the test after the timeout."""
        self._reader.join(timeout_s)
        timed_out = self._reader.is_alive()
        if timed_out:
            self.kill()
            self._reader.join()
        output = "".join(self._output)
        assert not timed_out, f"the job did not end within {timeout_s} s. Its output:\n{_tail(output)}"
        return Finished(self._launcher.wait(), output)

    def kill(self) -> None:
        """Kills all processes of the job that are left."""
        for pid in [self._launcher.pid, *self.processes()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def listening() -> dict[int, str]:
    """The TCP ports of this machine on which a process listens, with the inode of each socket."""
    result = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                result[int(fields[1].rpartition(":")[2], 16)] = fields[9]
    return result


def run_job(
    command: list[str], *, ranks: int, launcher: str = "mpirun", timeout_s: float, cwd: Path = ROOT
) -> Finished:
    """Runs a command on several ranks."""
    return Job(command, ranks=ranks, launcher=launcher, cwd=cwd).end(timeout_s)


def run_commands(lines: Sequence[Sequence[object]], *, ranks: int, folder: Path, timeout_s: float) -> list[Finished]:
    """Runs several command lines of hvdtrain in one job; returns the output and exit code of each."""
    folder.mkdir()
    commands = folder / "commands.json"
    commands.write_text(json.dumps([[str(word) for word in line] for line in lines]))
    command = [sys.executable, str(TESTS / "commands.py"), str(commands), str(folder)]
    job = run_job(command, ranks=ranks, timeout_s=timeout_s)
    logs = [[folder / f"command{i}-rank{rank}.log" for rank in range(ranks)] for i in range(len(lines))]
    outputs = ["".join(log.read_text() for log in each if log.exists()) for each in logs]
    assert job.code == 0, "\n".join([job.output, *map(_tail, outputs)])
    codes = [{int(log.with_suffix(".code").read_text()) for log in each} for each in logs]
    for code, output in zip(codes, outputs, strict=True):
        assert len(code) == 1, f"exit codes {code}\n{output}"
    return [Finished(code.pop(), output) for code, output in zip(codes, outputs, strict=True)]


def kill_rank_1_after_a_checkpoint(job: Job, run_dir: Path) -> None:
    """Sends SIGKILL to rank 1 once the run has a checkpoint, and requires that the job ends and names it."""
    deadline_s = time.monotonic() + 60
    while not list((run_dir / "checkpoints").glob("step-*")):
        assert job.is_running
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    os.kill(job.rank(1), signal.SIGKILL)
    ended = job.end(60)
    assert ended.code != 0
    assert "lost connection to rank 1 (host " in ended.only_message


def run_cases(
    names: str, *more: str, ranks: int, launcher: str = "mpirun", minimum: int, folder: Path, timeout_s: float
) -> None:
    """Runs ``cases_<name>.py`` under pytest on every rank; each rank must pass at least ``minimum`` tests.

    ``names`` are joined by ``+``, to start TensorFlow only once. ``more`` are options of pytest.
    """
    command = [sys.executable, str(TESTS / "run_cases.py"), names, str(folder), *more]
    job = run_job(command, ranks=ranks, launcher=launcher, timeout_s=timeout_s)
    logs = "\n".join(
        f"--- rank {rank}\n{_tail(log.read_text())}"
        for rank in range(ranks)
        if (log := folder / f"rank{rank}.log").exists()
    )
    assert job.code == 0, f"exit code {job.code}\n{_tail(job.output)}\n{logs}"
    for rank in range(ranks):
        executed = executed_tests(folder / f"rank{rank}.xml")
        assert executed >= minimum, f"rank {rank} passed {executed} tests, at least {minimum} are required\n{logs}"


def executed_tests(junit: Path) -> int:
    """The number of tests that a rank passed, from its JUnit file; 0 if there is none."""
    if not junit.exists():
        return 0
    suites = ElementTree.parse(junit).getroot().iter("testsuite")
    return sum(
        int(suite.get("tests", 0)) - sum(int(suite.get(kind, 0)) for kind in ("failures", "errors", "skipped"))
        for suite in suites
    )


def _tail(text: str) -> str:
    return "\n".join(text.splitlines()[-LOG_TAIL_LINES:])
