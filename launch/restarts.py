"""Restarts a job that fails: ``launch/run --restarts N CMD…``. Standard library only.

The job reports its status in the file that ``HVDTRAIN_SUPERVISOR_FILE`` names: a JSON object with ``exit_code`` (of
the error that ended the job, absent if it was killed; ``horovodrun --gloo`` replaces any code by 1),
``checkpoint_step`` (the step of the last checkpoint) and ``listener`` (the process that stops the job in order on a
signal). ``hvdtrain/system/supervisor_client.py`` writes it.
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

# Usage error, unusable data or checkpoint, diverged replicas, different configurations: a restart would fail again.
FINAL_CODES = (64, 65, 70, 78)
MAX_PAUSE_S = 60.0
POLL_INTERVAL_S = 1.0
# A terminal, or `timeout`, can send the same signal to a process and to its group.
SAME_SIGNAL_S = 1.0
GROUP_TIMEOUT_S = 30.0
# After the job has reported its exit code. mpirun waits a quarter of an hour for a host that is disconnected.
LAUNCHER_TIMEOUT_S = 30.0
EXAMPLE = "For example: launch/run --restarts 3 --restart-pause 10 horovodrun -np 2 python -m hvdtrain"


class OptionError(Exception):
    """An option has an invalid value; the arguments are the rule that it breaks and a remedy."""


@dataclasses.dataclass(frozen=True)
class Options:
    """The values of the options."""

    restarts: int
    """Maximum number of restarts."""
    pause_s: float
    """The pause before the first restart; each failure without progress doubles it."""


@dataclasses.dataclass(frozen=True)
class Status:
    """What a job has reported so far."""

    exit_code: int | None = None
    checkpoint_step: int | None = None
    listener: int | None = None


def take_options(arguments: list[str]) -> tuple[Options | None, list[str]]:
    """Separates the options from the command that follows; None if there are no options.

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


def restart_pauses(first_s: float) -> Iterator[float]:
    """Yields pauses, each twice as long as the previous one, up to a minute."""
    pause_s = first_s
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, max(MAX_PAUSE_S, first_s))


def supervise(
    program: str,
    command: list[str],
    env: Mapping[str, str],
    options: Options,
    say: Callable[[str], None],
    *,
    stop_signal: int | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Runs the command until it succeeds, fails permanently, or has no restarts left.

    Args:
        say: prints a message.
        stop_signal: a signal that the command forwards to its ranks and ignores itself, so that they have time to
            save; for jobs without a rank on this host.
        clock: returns the time in seconds; monotonic.

    Returns:
        The exit code of the job.
    """
    with tempfile.TemporaryDirectory(prefix="hvdtrain-") as folder:
        return _Supervisor(program, command, env, options, Path(folder) / "job.json", say, stop_signal, clock).run()


class _Supervisor:
    """Runs and restarts the command. Signals are blocked and received only while waiting, so that none is missed."""

    def __init__(
        self,
        program: str,
        command: list[str],
        env: Mapping[str, str],
        options: Options,
        file: Path,
        say: Callable[[str], None],
        stop_signal: int | None,
        clock: Callable[[], float],
    ):
        self._stop_signal = stop_signal
        self._program = program
        self._command = command
        self._env = {**env, "HVDTRAIN_SUPERVISOR_FILE": str(file)}
        self._options = options
        self._file = file
        self._say = say
        self._clock = clock
        self._forwarded_s: float | None = None
        # Signals that are ignored (nohup) stay ignored.
        signals = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
        self._signals = {each for each in signals if signal.getsignal(each) is not signal.SIG_IGN}
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._usual_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*self._signals, signal.SIGCHLD})

    def run(self) -> int:
        starts = self._options.restarts + 1
        pauses = restart_pauses(self._options.pause_s)
        last_step = -1
        for start in range(1, starts + 1):
            code, status = self._run_once(start)
            if code == 0 or self._forwarded_s is not None:
                return code
            if code in FINAL_CODES:
                self._say(f"the job ended with exit code {code}, which a restart would not change.")
                return code
            if start == starts:
                break
            if status.checkpoint_step is not None and status.checkpoint_step > last_step:
                last_step = status.checkpoint_step
                pauses = restart_pauses(self._options.pause_s)
            pause_s = next(pauses)
            self._say(f"the job ended with exit code {code}; start {start + 1} of at most {starts} in {pause_s:g} s.")
            if signal.sigtimedwait(self._signals, pause_s) is not None:
                self._say("received a signal; the job is not restarted.")
                return code
        if starts > 1:
            self._say(f"the job ended with exit code {code} in start {starts} of at most {starts}.")
        return code

    def _run_once(self, start: int) -> tuple[int, Status]:
        """Runs the command once; returns the exit code of the job, and its status."""
        self._file.unlink(missing_ok=True)
        # No input: a restart would find it consumed. A separate process group, so that the job does not receive a
        # terminal's Ctrl-C twice, directly and forwarded: mpirun exits at once on two signals within 5 s.
        child = subprocess.Popen(
            self._command,
            executable=self._program,
            env={**self._env, "HVDTRAIN_RESTART": str(start - 1)},
            stdin=subprocess.DEVNULL,
            preexec_fn=self._prepare_child,
        )
        ended_s: float | None = None
        while child.poll() is None:
            received = signal.sigtimedwait({*self._signals, signal.SIGCHLD}, POLL_INTERVAL_S)
            if received is not None and received.si_signo != signal.SIGCHLD:
                self._forward(received.si_signo, child.pid)
            if ended_s is None and read_status(self._file).exit_code is not None:
                ended_s = self._clock()
            if ended_s is not None and self._clock() - ended_s > LAUNCHER_TIMEOUT_S:
                self._say(f"the job has ended, but its launcher has not within {LAUNCHER_TIMEOUT_S:g} s: killing it.")
                self._kill_processes()
                child.wait()
        if self._forwarded_s is not None and child.returncode < 0:
            self._wait_for_group(child.pid)
        status = read_status(self._file)
        if child.returncode == 0:
            return 0, status
        return status.exit_code or (child.returncode if child.returncode > 0 else 128 - child.returncode), status

    def _prepare_child(self) -> None:
        os.setpgid(0, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._usual_mask)

    def _forward(self, received: int, group: int) -> None:
        """Forwards a signal to the job: the first one to its listener, if there is one.

        A launcher that receives the signal leaves its ranks little time to save (Open MPI: SIGTERM after 1 s, SIGKILL
        after 2 s; ``horovodrun --gloo``: SIGKILL after 5 s). A rank that receives it has no time limit.
        """
        now_s = self._clock()
        again = self._forwarded_s is not None
        if self._forwarded_s is not None and now_s - self._forwarded_s < SAME_SIGNAL_S:
            return
        self._forwarded_s = now_s
        name = signal.Signals(received).name
        self._say(f"forwarding {name} to the job{' again' if again else ', which is not restarted'}.")
        # horovodrun does not handle SIGHUP: it would end without its ranks.
        forwarded = signal.SIGTERM if received == signal.SIGHUP else received
        listener = None if again else self._listener()
        with contextlib.suppress(ProcessLookupError):
            if listener is not None:
                os.kill(listener, forwarded)
            elif self._stop_signal is not None and not again:
                os.kill(group, self._stop_signal)
            else:
                os.killpg(group, forwarded)

    def _listener(self) -> int | None:
        """Returns the job's listener if it is a process of the job: the process ID may be of another host."""
        pid = read_status(self._file).listener
        return pid if pid is not None and self._is_of_job(pid) else None

    def _is_of_job(self, pid: int) -> bool:
        """Whether a process has inherited the name of the job's status file."""
        try:
            return f"HVDTRAIN_SUPERVISOR_FILE={self._file}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(
                b"\0"
            )
        except OSError:
            return False

    def _kill_processes(self) -> None:
        """Kills all processes of the job, not only its group: mpirun starts ssh in separate groups."""
        for path in Path("/proc").glob("[0-9]*"):
            if self._is_of_job(int(path.name)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(path.name), signal.SIGKILL)

    def _wait_for_group(self, group: int) -> None:
        """Waits for the other processes of the group: horovodrun's shell dies of a signal at once, mpirun later."""
        deadline_s = self._clock() + GROUP_TIMEOUT_S
        while self._clock() < deadline_s and _is_alive(group):
            received = signal.sigtimedwait(self._signals, 0.1)
            if received is not None:
                self._forward(received.si_signo, group)


def _is_alive(group: int) -> bool:
    """Whether a process of the group runs; zombies may remain in it if nothing reaps orphans."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # After the program's name, which may contain spaces and brackets: state, parent, group.
            state, _, its_group = path.read_text(errors="replace").rpartition(")")[2].split()[:3]
            if int(its_group) == group and state != "Z":
                return True
    return False


def read_status(file: Path) -> Status:
    """Returns what the job has reported; empty if the file is missing or invalid."""
    try:
        values: Any = json.loads(file.read_text())
    except (OSError, ValueError):
        return Status()
    values = values if isinstance(values, dict) else {}
    return Status(
        **{name: values[name] for name in ("exit_code", "checkpoint_step", "listener") if _is_int(values.get(name))}
    )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
