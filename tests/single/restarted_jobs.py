"""Starts launch/run --restarts with small scripts as jobs, some of which act as a launcher."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# launch/run without the check of its environment. The file named by `later` advances its clock by 100 s.
RUN = """
import functools, os, sys, time
sys.path.insert(0, {launch!r})
import bootstrap
clock = lambda: time.monotonic() + (100 if os.path.exists({later!r}) else 0)
bootstrap.supervise = functools.partial(bootstrap.supervise, clock=clock)
{more}bootstrap.ensure_environment = lambda with_tools: bootstrap.Path(sys.prefix)
bootstrap.main(sys.argv[1:])
"""

PRELUDE = """
import os, signal, subprocess, sys, time
sys.path.insert(0, {root!r})
from hvdtrain.system.supervisor_client import note_checkpoint, note_exit_code, note_listener

def log(line):
    with open({log!r}, "a") as file:
        file.write(line + "\\n")

def wait_for_signals():
    time.sleep(60)

def wait_for_file(path):
    while not os.path.exists(path):
        time.sleep(0.02)

def log_signals(name, exit_code=75, save_s=0.0):
    def save_and_end(number, frame):
        log(f"{{name}} got {{signal.Signals(number).name}}")
        time.sleep(save_s)
        log(f"{{name}} ends")
        sys.exit(exit_code)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, save_and_end)

start = int(os.environ["HVDTRAIN_RESTART"]) + 1
log(f"start {{start}}")
"""


class Job:
    """A script as a job, and the log of its starts."""

    def __init__(self, folder: Path):
        self._folder = folder
        self.log = folder / "log"
        self.stderr = folder / "stderr"
        self.later = folder / "later"
        self.finish = folder / "finish"
        self.processes: list[subprocess.Popen] = []
        self.supervisor = ""

    def command(self, script: str, name: str = "job.py") -> list[str]:
        path = self._folder / name
        path.write_text(PRELUDE.format(root=str(ROOT), log=str(self.log)) + script)
        return [sys.executable, str(path)]

    def start(self, *arguments: str, prepare: Callable[[], object] = lambda: None) -> subprocess.Popen:
        def in_child() -> None:
            # A test run in the background ignores these, and children inherit that.
            for number in (signal.SIGINT, signal.SIGQUIT):
                signal.signal(number, signal.SIG_DFL)
            prepare()

        run = RUN.format(launch=str(ROOT / "launch"), later=str(self.later), more=self.supervisor)
        with self.stderr.open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, "-c", run, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
                preexec_fn=in_child,
            )
        self.processes.append(process)
        return process

    def run(self, script: str, *options: str) -> int:
        return self.start(*options, *self.command(script)).wait(timeout=60)

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def wait_for(self, line: str) -> None:
        deadline = time.monotonic() + 30
        while line not in self.lines() and not any(line in each for each in self.messages()):
            assert time.monotonic() < deadline, f"{line!r} is missing: {self.lines()} {self.messages()}"
            time.sleep(0.02)

    def messages(self) -> list[str]:
        return self.stderr.read_text().splitlines()

    def pauses(self) -> list[str]:
        return [line.rpartition(" in ")[2] for line in self.messages() if "; start " in line]
