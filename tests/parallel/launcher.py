"""Starts real jobs for the tests: a kill timer, an exit code, a minimum of executed tests, each rank's log."""

import dataclasses
import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent.parent
LOG_TAIL_LINES = 60

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


def run_job(
    command: list[str], *, ranks: int, launcher: str = "mpirun", timeout_s: float, cwd: Path = ROOT
) -> Finished:
    """Runs a command on several ranks; a job that outlives the timer is killed whole and fails the test."""
    job = subprocess.Popen(
        [*LAUNCHERS[launcher], str(ranks), *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    try:
        output, _ = job.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        output, _ = job.communicate()
        raise AssertionError(f"the job did not end within {timeout_s} s. Its output:\n{_tail(output)}") from None
    return Finished(job.returncode, output)


def run_cases(name: str, *, ranks: int, minimum: int, folder: Path, launcher: str = "mpirun", timeout_s: float) -> None:
    """Runs ``cases_<name>.py`` under pytest on every rank; demands that each rank executed and passed enough."""
    command = [sys.executable, str(TESTS / "run_cases.py"), name, str(folder)]
    job = run_job(command, ranks=ranks, launcher=launcher, timeout_s=timeout_s)
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
