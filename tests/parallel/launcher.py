"""Starts real jobs for the tests: a kill timer, an exit code, a minimum of executed tests, each rank's log."""

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
_TOLD = "hvdtrain: "
# A test's parameters that differ little from its others.
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
    def told(self) -> list[str]:
        """What hvdtrain has said of errors and stops, without tags of launchers."""
        # Not only at the beginning of a line: Horovod writes lines of its own in pieces, and ours come between them.
        return [line[line.index(_TOLD) :] for line in self.output.splitlines() if _TOLD in line]

    @property
    def only_line_told(self) -> str:
        """Fails the test where there is not exactly one."""
        assert len(self.told) == 1, self.output
        return self.told[0]


class Job:
    """A job that runs."""

    def __init__(self, command: list[str], *, ranks: int, launcher: str = "mpirun", cwd: Path = ROOT):
        # Every process of the job carries it in its environment, whatever group a launcher puts it into.
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
        # Read all the time: a job whose output nobody takes stands still.
        self._output: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._launcher.stdout is not None
        self._output += self._launcher.stdout

    def signal(self, number: signal.Signals) -> None:
        """To the launcher."""
        self._launcher.send_signal(number)

    @property
    def is_running(self) -> bool:
        """Whether the launcher is."""
        return self._launcher.poll() is None

    def processes(self) -> dict[int, dict[str, str]]:
        """The environments of the job's processes by their numbers."""
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
        """The process of a rank, as soon as there is one."""
        while True:
            for pid, environment in self.processes().items():
                rank = environment.get("OMPI_COMM_WORLD_RANK", environment.get("HOROVOD_RANK"))
                if rank == str(number) and "python" in Path(f"/proc/{pid}/comm").read_text():
                    return pid
            assert self._launcher.poll() is None, "the job has ended"
            time.sleep(0.05)

    def ports(self) -> set[int]:
        """The ports on which its processes listen."""
        sockets = set()
        for pid in self.processes():
            for link in Path(f"/proc/{pid}/fd").glob("*"):
                with contextlib.suppress(OSError):
                    sockets.add(str(link.readlink()))
        return {port for port, inode in listening().items() if f"socket:[{inode}]" in sockets}

    def end(self, timeout_s: float) -> Finished:
        """Waits for its end; a job that outlives the timer is killed whole and fails the test."""
        self._reader.join(timeout_s)
        is_late = self._reader.is_alive()
        if is_late:
            self.kill()
            self._reader.join()
        output = "".join(self._output)
        assert not is_late, f"the job did not end within {timeout_s} s. Its output:\n{_tail(output)}"
        return Finished(self._launcher.wait(), output)

    def kill(self) -> None:
        """Whatever is left of it."""
        for pid in [self._launcher.pid, *self.processes()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def listening() -> dict[int, str]:
    """The TCP ports of this machine on which somebody listens, and the inode of each socket."""
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
    """Runs command lines of hvdtrain one after the other in one job: what all ranks said, and their exit code."""
    folder.mkdir()
    asked = folder / "commands.json"
    asked.write_text(json.dumps([[str(word) for word in line] for line in lines]))
    command = [sys.executable, str(TESTS / "commands.py"), str(asked), str(folder)]
    job = run_job(command, ranks=ranks, timeout_s=timeout_s)
    said = [[folder / f"command{i}-rank{rank}.log" for rank in range(ranks)] for i in range(len(lines))]
    outputs = ["".join(log.read_text() for log in each if log.exists()) for each in said]
    assert job.code == 0, "\n".join([job.output, *map(_tail, outputs)])
    codes = [{int(log.with_suffix(".code").read_text()) for log in each} for each in said]
    for code, output in zip(codes, outputs, strict=True):
        assert len(code) == 1, f"exit codes {code}\n{output}"
    return [Finished(code.pop(), output) for code, output in zip(codes, outputs, strict=True)]


def run_cases(name: str, *more: str, ranks: int, minimum: int, folder: Path, timeout_s: float) -> None:
    """Runs ``cases_<name>.py`` under pytest on every rank; demands that each rank executed and passed enough.

    ``more`` are options of pytest.
    """
    command = [sys.executable, str(TESTS / "run_cases.py"), name, str(folder), *more]
    job = run_job(command, ranks=ranks, timeout_s=timeout_s)
    logs = "\n".join(
        f"--- rank {rank}\n{_tail(log.read_text())}"
        for rank in range(ranks)
        if (log := folder / f"rank{rank}.log").exists()
    )
    assert job.code == 0, f"exit code {job.code}\n{_tail(job.output)}\n{logs}"
    for rank in range(ranks):
        executed = executed_tests(folder / f"rank{rank}.xml")
        assert executed >= minimum, f"rank {rank} executed {executed} tests, at least {minimum} are due\n{logs}"


def executed_tests(junit: Path) -> int:
    """The tests that a rank ran and passed, by its JUnit file; 0 where it left none."""
    if not junit.exists():
        return 0
    suites = ElementTree.parse(junit).getroot().iter("testsuite")
    return sum(
        int(suite.get("tests", 0)) - sum(int(suite.get(kind, 0)) for kind in ("failures", "errors", "skipped"))
        for suite in suites
    )


def _tail(text: str) -> str:
    return "\n".join(text.splitlines()[-LOG_TAIL_LINES:])
