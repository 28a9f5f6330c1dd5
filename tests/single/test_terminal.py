"""Detection of a terminal behind launchers."""

import io
import os
import pty
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from hvdtrain.system import terminal


@contextmanager
def pseudo_terminal() -> Iterator[int]:
    """Opens a pseudo-terminal; yields the side that programs write to."""
    screen, programs = pty.openpty()
    try:
        yield programs
    finally:
        os.close(programs)
        os.close(screen)


class FakeProcess:
    def __init__(self, pid, command):
        self.pid = pid
        self._command = command

    def cmdline(self):
        return self._command.split()


class Processes:
    """Fakes this process on its own terminal, with ancestors that the test adds, nearest first."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, own: str):
        self._folder = folder
        self.own = own
        self.pid = 0
        self._ancestors: list[FakeProcess] = []
        self._stdout(0, own)
        monkeypatch.setattr(psutil, "Process", lambda: self)
        monkeypatch.setattr(terminal, "_stdout_of", lambda process: folder / f"{process.pid}-stdout")
        # Not sys.stdout, which pytest restores between a fixture and its test.
        self.stdout = open(own, "w")  # noqa: SIM115
        monkeypatch.setattr(terminal, "sys", self)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")

    def _stdout(self, pid: int, target: str) -> None:
        (self._folder / f"{pid}-stdout").symlink_to(target)

    def add(self, pid: int, stdout: str, *, command: str = "mpirun -np 2 python") -> None:
        self._stdout(pid, stdout)
        self._ancestors.append(FakeProcess(pid, command))

    def parents(self):
        return self._ancestors


@pytest.fixture
def processes(tmp_path, monkeypatch):
    with pseudo_terminal() as programs:
        fakes = Processes(tmp_path, monkeypatch, os.ttyname(programs))
        yield fakes
        fakes.stdout.close()


def test_stdout_of_the_launcher_counts(processes):
    with pseudo_terminal() as programs:
        processes.add(10, os.ttyname(programs))
        assert terminal.stdout_is_terminal()


def test_no_bar_if_the_launcher_writes_to_a_file(processes, tmp_path):
    (tmp_path / "log").touch()
    processes.add(10, str(tmp_path / "log"))
    assert not terminal.stdout_is_terminal()


@pytest.mark.parametrize("to_a_file", [False, True])
def test_a_shell_between_launcher_and_rank_is_skipped(processes, tmp_path, to_a_file):
    (tmp_path / "log").touch()
    with pseudo_terminal() as programs:
        processes.add(10, processes.own, command="sh")
        processes.add(7, str(tmp_path / "log") if to_a_file else os.ttyname(programs))
        assert terminal.stdout_is_terminal() is not to_a_file


def test_no_bar_if_the_launcher_tags_lines(processes):
    with pseudo_terminal() as programs:
        processes.add(10, os.ttyname(programs), command="mpirun --tag-output -np 2 python")
        assert not terminal.stdout_is_terminal()


def test_no_bar_if_the_launcher_is_not_visible(processes):
    assert not terminal.stdout_is_terminal()


def test_own_stdout_counts_without_a_launcher(processes, monkeypatch):
    monkeypatch.delenv("OMPI_COMM_WORLD_RANK")
    assert terminal.stdout_is_terminal()
    monkeypatch.setenv("TERM", "dumb")
    assert not terminal.stdout_is_terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(terminal, "sys", types.SimpleNamespace(stdout=io.StringIO()))
    assert not terminal.stdout_is_terminal()


MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")


@pytest.mark.skipif(MPIRUN is None, reason="Open MPI is not installed")
@pytest.mark.parametrize("to_a_terminal", [True, False])
def test_pseudo_terminals_of_open_mpi_are_detected(tmp_path, to_a_terminal):
    code = (
        "import sys; from pathlib import Path; from hvdtrain.system import terminal;"
        "Path(sys.argv[1]).write_text(f'{sys.stdout.isatty()} {terminal.stdout_is_terminal()}')"
    )
    environment = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", **os.environ, "TERM": "xterm"}
    command = [MPIRUN, "-np", "1", "--oversubscribe", sys.executable, "-c", code, str(tmp_path / "answer")]
    with pseudo_terminal() as programs:
        stdout = programs if to_a_terminal else subprocess.DEVNULL
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE, env=environment, timeout=60
        )
    assert done.returncode == 0, done.stderr.decode()
    assert (tmp_path / "answer").read_text() == f"True {to_a_terminal}"


@pytest.mark.parametrize("where", ["a full disk", "a closed pipe"])
def test_output_that_cannot_be_written_does_not_end_the_process(where):
    script = """
import sys
from hvdtrain.system import terminal
sys.stdout.write("a line\\n")
terminal.write("a message")
terminal.discard_unwritable_output()
sys.exit(75)
"""
    if where == "a full disk":
        output = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, output = os.pipe()
        os.close(reader)
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    both = subprocess.run([sys.executable, "-c", script], stdout=output, stderr=output, env=buffered)
    one = subprocess.run([sys.executable, "-c", script], stdout=output, stderr=subprocess.PIPE, text=True, env=buffered)
    os.close(output)
    assert both.returncode == 75
    assert (one.returncode, one.stderr) == (75, "a message\n")
