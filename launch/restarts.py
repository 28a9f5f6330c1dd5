"""Starts a job again when it has died: ``launch/run --restarts N CMD…``. Only the standard library.

A job tells more than its launcher's exit code does, in the file that ``HVDTRAIN_SUPERVISOR_FILE`` names: a JSON
object with ``exit_code`` (of the error it ended with, absent when it died; ``horovodrun --gloo`` makes 1 of any),
``checkpoint_step`` (the last step saved) and ``listener`` (the process that stops the job when it gets a
signal). ``hvdtrain/supervised.py`` writes it.
"""

import contextlib
import dataclasses
import json
import math
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

# Usage, data or a checkpoint, replicas that differ, ranks that disagree: another start would meet the same.
FINAL_CODES = (64, 65, 70, 78)
LONGEST_PAUSE_S = 60.0
LOOK_EVERY_S = 1.0
# A terminal, or `timeout`, can send the same signal to a process and to its group.
ONE_SIGNAL_S = 1.0
GROUP_ENDS_S = 30.0
# After the job has said that it ends. mpirun would wait for a host that is cut off for a quarter of an hour.
LAUNCHER_ENDS_S = 30.0
EXAMPLE = "For example: launch/run --restarts 3 --restart-pause 10 horovodrun -np 2 python -m hvdtrain"


class OptionError(Exception):
    """An option has a value that it cannot have; holds the rule that it breaks and a remedy."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What was asked for."""

    restarts: int
    """Starts after the first one, at most."""
    pause_s: float
    """The first pause before a start; each failure without progress doubles the next one."""


@dataclasses.dataclass(frozen=True)
class Report:
    """What a job has told so far."""

    exit_code: int | None = None
    checkpoint_step: int | None = None
    listener: int | None = None


def take_options(arguments: list[str]) -> tuple[Options | None, list[str]]:
    """Parts the options from the command behind them; None where the command is to run only once.

    Raises:
        OptionError: a value is missing or unusable.
    """
    given: dict[str, str] = {}
    command = list(arguments)
    while command and command[0].partition("=")[0] in ("--restarts", "--restart-pause"):
        name, equals, value = command.pop(0).partition("=")
        given[name] = value if equals or not command else command.pop(0)
    if not given:
        return None, command
    restarts, pause = given.get("--restarts"), given.get("--restart-pause", "1")
    if restarts is None:
        raise OptionError("--restart-pause must come with --restarts. Received: --restart-pause alone.", EXAMPLE)
    if not (restarts.isascii() and restarts.isdigit()):
        raise OptionError(f"--restarts must be a whole number, at least 0. Received: {restarts or 'nothing'}.", EXAMPLE)
    if not 0 <= _number(pause) < math.inf:
        raise OptionError(
            f"--restart-pause must be a number of seconds, at least 0. Received: {pause or 'nothing'}.", EXAMPLE
        )
    return Options(int(restarts), float(pause)), command


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def growing_pauses(first_s: float) -> Iterator[float]:
    """Each pause is twice as long as the one before, up to a minute."""
    pause_s = first_s
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, max(LONGEST_PAUSE_S, first_s))


def supervise(
    program: str,
    command: list[str],
    env: Mapping[str, str],
    options: Options,
    say: Callable[[str], None],
    *,
    stop_signal: int | None = None,
) -> int:
    """Runs the command until it succeeds, fails for good, or was started often enough.

    Args:
        stop_signal: one that the command passes on to its ranks and does not heed itself, so that they have time to
            save; for a job none of whose ranks runs here.

    Returns:
        The exit code to hand out.
    """
    with tempfile.TemporaryDirectory(prefix="hvdtrain-") as folder:
        return _Supervisor(program, command, env, options, Path(folder) / "job.json", say, stop_signal).run()


class _Supervisor:
    """Holds back the signals that would end this process and takes them where it waits: none comes between."""

    def __init__(
        self,
        program: str,
        command: list[str],
        env: Mapping[str, str],
        options: Options,
        file: Path,
        say: Callable[[str], None],
        stop_signal: int | None,
    ):
        self._stop_signal = stop_signal
        self._program = program
        self._command = command
        self._env = {**env, "HVDTRAIN_SUPERVISOR_FILE": str(file)}
        self._options = options
        self._file = file
        self._say = say
        self._passed_on_s: float | None = None
        # One that is ignored (nohup) stays so.
        endings = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
        self._endings = {each for each in endings if signal.getsignal(each) is not signal.SIG_IGN}
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._usual_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*self._endings, signal.SIGCHLD})

    def run(self) -> int:
        starts = self._options.restarts + 1
        pauses = growing_pauses(self._options.pause_s)
        last_saved = -1
        for start in range(1, starts + 1):
            code, report = self._run_once(start)
            if code == 0 or self._passed_on_s is not None:
                return code
            if code in FINAL_CODES:
                self._say(f"the job ended with exit code {code}, which another start would not change.")
                return code
            if start == starts:
                break
            if report.checkpoint_step is not None and report.checkpoint_step > last_saved:
                last_saved = report.checkpoint_step
                pauses = growing_pauses(self._options.pause_s)
            pause_s = next(pauses)
            self._say(f"the job died with exit code {code}; start {start + 1} of at most {starts} in {pause_s:g} s.")
            if signal.sigtimedwait(self._endings, pause_s) is not None:
                self._say("a signal came; the job is not started again.")
                return code
        if starts > 1:
            self._say(f"the job died with exit code {code} in start {starts} of at most {starts}.")
        return code

    def _run_once(self, start: int) -> tuple[int, Report]:
        """The exit code that counts, and what the job has told."""
        self._file.unlink(missing_ok=True)
        # Without input: a second start would find it used up. The group of its own keeps a terminal's Ctrl-C from
        # reaching the job twice, on its own and passed on: mpirun exits at once when two signals come within 5 s.
        child = subprocess.Popen(
            self._command,
            executable=self._program,
            env={**self._env, "HVDTRAIN_RESTART": str(start - 1)},
            stdin=subprocess.DEVNULL,
            preexec_fn=self._prepare_child,
        )
        ended_s: float | None = None
        while child.poll() is None:
            received = signal.sigtimedwait({*self._endings, signal.SIGCHLD}, LOOK_EVERY_S)
            if received is not None and received.si_signo != signal.SIGCHLD:
                self._pass_on(received.si_signo, child.pid)
            if ended_s is None and read_report(self._file).exit_code is not None:
                ended_s = time.monotonic()
            if ended_s is not None and time.monotonic() - ended_s > LAUNCHER_ENDS_S:
                self._say(f"the job has ended, but not its launcher within {LAUNCHER_ENDS_S:g} s: it is killed.")
                self._kill_processes()
                child.wait()
        if self._passed_on_s is not None and child.returncode < 0:
            self._wait_for_group(child.pid)
        report = read_report(self._file)
        if child.returncode == 0:
            return 0, report
        return report.exit_code or (child.returncode if child.returncode > 0 else 128 - child.returncode), report

    def _prepare_child(self) -> None:
        os.setpgid(0, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._usual_mask)

    def _pass_on(self, received: int, group: int) -> None:
        """Hands a signal to the job: the first one to the process that listens for it, where there is one.

        A launcher that gets the signal leaves its ranks hardly any time to save (Open MPI: SIGTERM after 1 s,
        SIGKILL after 2 s; ``horovodrun --gloo``: SIGKILL after 5 s). A rank that gets it has all the time it needs.
        """
        now_s = time.monotonic()
        again = self._passed_on_s is not None
        if self._passed_on_s is not None and now_s - self._passed_on_s < ONE_SIGNAL_S:
            return
        self._passed_on_s = now_s
        name = signal.Signals(received).name
        self._say(f"{name} is passed on to the job{' once more' if again else ', which is not started again'}.")
        # horovodrun does not know SIGHUP: it would leave its ranks alone.
        passed_on = signal.SIGTERM if received == signal.SIGHUP else received
        listener = None if again else self._listener()
        with contextlib.suppress(ProcessLookupError):
            if listener is not None:
                os.kill(listener, passed_on)
            elif self._stop_signal is not None and not again:
                os.kill(group, self._stop_signal)
            else:
                os.killpg(group, passed_on)

    def _listener(self) -> int | None:
        """The process that the job has named, if it is one of the job's: the number may be another host's."""
        pid = read_report(self._file).listener
        return pid if pid is not None and self._is_of_job(pid) else None

    def _is_of_job(self, pid: int) -> bool:
        """Whether a process has inherited the name of the job's file."""
        try:
            return f"HVDTRAIN_SUPERVISOR_FILE={self._file}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(
                b"\0"
            )
        except OSError:
            return False

    def _kill_processes(self) -> None:
        """Those of the job's group and others: mpirun starts ssh in groups of its own."""
        for path in Path("/proc").glob("[0-9]*"):
            if self._is_of_job(int(path.name)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(path.name), signal.SIGKILL)

    def _wait_for_group(self, group: int) -> None:
        """A shell between us and mpirun, such as horovodrun's, dies of a signal at once; mpirun takes its time."""
        deadline_s = time.monotonic() + GROUP_ENDS_S
        while time.monotonic() < deadline_s and _is_alive(group):
            received = signal.sigtimedwait(self._endings, 0.1)
            if received is not None:
                self._pass_on(received.si_signo, group)


def _is_alive(group: int) -> bool:
    """Whether a process of the group still runs; dead ones may stay in it where nobody waits for orphans."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # After the program's name, which may hold spaces and brackets: state, parent, group.
            state, _, its_group = path.read_text(errors="replace").rpartition(")")[2].split()[:3]
            if int(its_group) == group and state != "Z":
                return True
    return False


def read_report(file: Path) -> Report:
    """What the job has told; nothing where it has written nothing, or nothing of use."""
    try:
        told: Any = json.loads(file.read_text())
    except (OSError, ValueError):
        return Report()
    told = told if isinstance(told, dict) else {}
    return Report(
        **{name: told[name] for name in ("exit_code", "checkpoint_step", "listener") if _is_int(told.get(name))}
    )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
