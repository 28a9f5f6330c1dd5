"""``hvdtrain elastic``: starts processes that train together, and continues when some die, leave or join."""

import os
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from hvdtrain.config.fields import broken_rule
from hvdtrain.errors import DataError, DisagreementError, DivergenceError, StoppedEarly, UsageError
from hvdtrain.fault_tolerance.elastic.coordinator import Coordinator
from hvdtrain.fault_tolerance.elastic.membership import Membership
from hvdtrain.system import environment, network

# A restart would fail again.
_FINAL_CODES = tuple(
    error.exit_code for error in (UsageError, DataError, DivergenceError, DisagreementError, StoppedEarly)
)
_FLAGS_WITH_VALUE = ("--np", "--host", "--timeout")
_POLL_S = 0.05
_FIRST_PAUSE_S, _MAX_PAUSE_S = 1.0, 60.0
_END_S = 60.0
"""How long processes may take to end when the job has."""


def split_command(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divides arguments into the options of ``elastic`` with MIN:MAX, and the command, the second other word."""
    own: list[str] = []
    rest = list(arguments)
    num_words = 0
    while rest and not (num_words == 1 and not rest[0].startswith("-")):
        word = rest.pop(0)
        if word == "--":
            break
        own.append(word)
        if word in _FLAGS_WITH_VALUE and rest:
            own.append(rest.pop(0))
        num_words += not word.startswith("-")
    return own, rest


class Worker:
    """A process of the job on this host, started again when it dies."""

    def __init__(self, command: Sequence[str], env: dict[str, str]):
        self._command = list(command)
        self._env = env
        self._pause_s = _FIRST_PAUSE_S
        self._start_at = 0.0
        self.process: subprocess.Popen[bytes] | None = None

    def start_if_due(self, now: float) -> None:
        if self.process is None and now >= self._start_at:
            # Its own session: a terminal's Ctrl-C is for the coordinator, which stops all members at one step.
            self.process = subprocess.Popen(
                self._command, env=self._env, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def restart_later(self, now: float) -> float:
        """Returns the pause before the next start, twice as long each time."""
        self.process = None
        pause_s = self._pause_s
        self._start_at = now + pause_s
        self._pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        return pause_s


class ElasticJob:
    """The coordinator of a job and its processes on this host.

    Args:
        start_size: number of processes to start here, and that the first generation waits for.
    """

    def __init__(self, membership: Membership, command: Sequence[str], start_size: int, timeout_s: float, host: str):
        token = environment.elastic_token() or secrets.token_hex(16)
        self._coordinator = Coordinator(
            membership,
            token=token,
            start_size=start_size,
            timeout_s=timeout_s,
            host=host,
            say=_say,
            on_removed=self._kill_removed,
        )
        address = f"{host or '127.0.0.1'}:{self._coordinator.port}"
        env = {**environment.launch_environment(), **environment.elastic_variables(address, token)}
        self._workers = [Worker(command, env) for _ in range(start_size)]
        self._num_signals = 0
        _say(f"{start_size} process(es) of {shlex.join(command)}; others join at {address}")

    def run(self) -> int:
        """Returns the exit code of the job."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._handle_signal)
        coordinator = self._coordinator
        try:
            while coordinator.exit_code is None:
                self._start_and_reap()
                coordinator.poll(_POLL_S)
            return self._end(coordinator.exit_code)
        finally:
            coordinator.close()
            self._kill_all()

    def _start_and_reap(self) -> None:
        now = time.monotonic()
        for worker in list(self._workers):
            worker.start_if_due(now)
            code = None if worker.process is None else worker.process.poll()
            if code is None:
                continue
            if code == 0 or code in _FINAL_CODES:
                self._workers.remove(worker)
                if code != 0 and self._coordinator.generation == 0:
                    self._coordinator.exit_code = code
            elif self._coordinator.generation == 0:
                # It has never trained: what it fails of is likely to be the same in its next start.
                self._coordinator.exit_code = code if code > 0 else 1
            else:
                pause_s = worker.restart_later(now)
                _say(f"a process ended with {_describe(code)}; it is started again in {pause_s:g} s")
        if not self._workers and not self._coordinator.has_members and self._coordinator.exit_code is None:
            self._coordinator.exit_code = 1

    def _end(self, code: int) -> int:
        coordinator = self._coordinator
        _say(f"exit code {code} after {coordinator.generation} generation(s); {coordinator.lost} rank(s) were lost")
        until = time.monotonic() + _END_S
        while time.monotonic() < until and any(self._running()):
            coordinator.poll(_POLL_S)
        return code

    def _running(self) -> list[subprocess.Popen[bytes]]:
        processes = [worker.process for worker in self._workers]
        return [process for process in processes if process is not None and process.poll() is None]

    def _kill_removed(self, pid: int, host: str) -> None:
        """A member that is stopped, or does not get on, is no longer part of the job: another takes its place."""
        for process in self._running():
            if process.pid == pid and host == network.host_name():
                process.kill()

    def _kill_all(self) -> None:
        for process in self._running():
            process.kill()
            process.wait()

    def _handle_signal(self, number: int, frame: object) -> None:
        self._num_signals += 1
        if self._num_signals == 1:
            self._coordinator.stop(f"{signal.Signals(number).name} to hvdtrain elastic")
        elif self._num_signals > 2:
            self._kill_all()
            os._exit(StoppedEarly.exit_code)


def run(command: Sequence[str], *, members: str, np: int | None = None, host: str = "", timeout: float = 600.0) -> int:
    """Returns the exit code of the job.

    Args:
        members: ``MIN:MAX``.
        np: number of processes to start here (default: MAX).
        host: the address that other hosts reach this one at (default: this host only).
        timeout: seconds that fewer than MIN members wait for others.

    Raises:
        UsageError: an option breaks its rule.
    """
    least, _, most = members.partition(":")
    if not (least.isdigit() and most.isdigit() and 1 <= int(least) <= int(most)):
        raise UsageError(f"MIN:MAX must be two whole numbers, 1 <= MIN <= MAX. Received: {members!r}")
    if timeout < 0:
        raise broken_rule("timeout", "at least 0", timeout)
    start_size = int(most) if np is None else np
    if not int(least) <= start_size <= int(most):
        raise broken_rule("np", f"from MIN to MAX, {least} to {most}", start_size)
    if not command:
        raise UsageError("a command is missing. For example: hvdtrain elastic 2:4 python -m hvdtrain")
    membership = Membership(int(least), int(most))
    return ElasticJob(membership, command, start_size, timeout, host or "127.0.0.1").run()


def _describe(code: int) -> str:
    return f"exit code {code}" if code > 0 else signal.Signals(-code).name


def _say(text: str) -> None:
    print(f"hvdtrain elastic: {text}", file=sys.stderr, flush=True)
