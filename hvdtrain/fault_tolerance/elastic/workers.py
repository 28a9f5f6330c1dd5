"""The processes that ``hvdtrain elastic`` starts: on which hosts, and when they are restarted."""

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence

from hvdtrain.errors import DataError, DisagreementError, DivergenceError, StoppedEarly, UsageError
from hvdtrain.fault_tolerance.elastic.host_list import HostList
from hvdtrain.system.hosts import Host, remote_names
from hvdtrain.system.remote_process import start_remote

# A restart would fail again.
_FINAL_CODES = tuple(
    error.exit_code for error in (UsageError, DataError, DivergenceError, DisagreementError, StoppedEarly)
)
# Of a shell whose command was ended by a signal, and of ssh.
_FIRST_SIGNAL, _UNREACHABLE = 128, 255
_FIRST_PAUSE_S, _MAX_PAUSE_S = 1.0, 60.0
_LONG_RUN_S = 300.0
"""A process that has run for this long is restarted after the first pause."""


class Worker:
    """A process of the job, restarted when it dies.

    Args:
        number: identifies the process to the coordinator.
        host: None: this one.
    """

    def __init__(self, number: int, host: str | None, command: Sequence[str], env: Mapping[str, str]):
        self.number = number
        self.host = host
        self._command = list(command)
        self._env = dict(env)
        self._pause_s = _FIRST_PAUSE_S
        self._start_at = self._started_at = 0.0
        self.num_restarts = 0
        self.is_last = False
        """Whether it will not be restarted."""
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start_if_due(self, now: float) -> None:
        if self._process is not None or now < self._start_at:
            return
        self._started_at = now
        if self.host is not None:
            self._process = start_remote(self.host, self._command, self._env)
        else:
            # In a separate session: a terminal's Ctrl-C is for the coordinator, which stops all members at one step.
            self._process = subprocess.Popen(
                self._command, env=self._env, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def exit_code(self) -> int | None:
        """The exit code if it has ended."""
        return None if self._process is None else self._process.poll()

    def restart_later(self, now: float) -> float:
        """Returns the pause before the next start, twice as long each time."""
        self._process = None
        self.num_restarts += 1
        if now - self._started_at > _LONG_RUN_S:
            self._pause_s = _FIRST_PAUSE_S
        pause_s = self._pause_s
        self._start_at = now + pause_s
        self._pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        return pause_s

    def kill(self) -> None:
        """Kills the process and its descendants; on another host, only the process."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)


class Workers:
    """The processes of a job that this process has started.

    Args:
        make_worker: makes the worker with a number, for a host (None: this one).
        maximum: most workers.
    """

    def __init__(
        self,
        make_worker: Callable[[int, str | None], Worker],
        hosts: HostList,
        maximum: int,
        say: Callable[[str], None],
    ):
        self._make_worker = make_worker
        self._hosts = hosts
        self._maximum = maximum
        self._say = say
        self._next_number = 0
        self._workers: list[Worker] = []
        self._fill()

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def num_running(self) -> int:
        return sum(worker.is_running for worker in self._workers)

    def _fill(self) -> None:
        """Adds a worker for each free slot, up to the maximum."""
        staying = [worker for worker in self._workers if not worker.is_last]
        for name, slots in self._hosts.hosts:
            host = name if remote_names([Host(name, 1)]) else None
            used = sum(worker.host == host for worker in staying)
            for _ in range(min(slots - used, self._maximum - len(staying))):
                staying.append(self._make_worker(self._next_number, host))
                self._workers.append(staying[-1])
                self._next_number += 1

    def follow_hosts(self, now: float) -> list[int]:
        """Adapts to changes of the hosts; returns the numbers of the workers that have to leave."""
        if not self._hosts.has_changed(now, self._say):
            return []
        self._say(f"hosts: {', '.join(map(str, self._hosts.hosts)) or 'none'}")
        slots = {(name if remote_names([Host(name, 1)]) else None): n for name, n in self._hosts.hosts}
        leaving = []
        for worker in self._workers:
            if not worker.is_last:
                slots[worker.host] = slots.get(worker.host, 0) - 1
                if slots[worker.host] < 0:
                    worker.is_last = True
                    leaving.append(worker.number)
        self._workers = [worker for worker in self._workers if worker.is_running or not worker.is_last]
        self._fill()
        return leaving

    def start_and_reap(self, now: float, *, has_trained: bool) -> int | None:
        """Starts the workers that are due.

        Args:
            has_trained: whether the job has had a generation. Before that, a worker that fails is not restarted,
                because it would probably fail again; one that is killed is restarted up to three times.

        Returns:
            The exit code of the job if a worker's failure decides it.
        """
        for worker in list(self._workers):
            if not worker.is_last:
                worker.start_if_due(now)
            code = worker.exit_code()
            if code is None:
                continue
            if not has_trained and (0 < code < _FIRST_SIGNAL or code == _UNREACHABLE or worker.num_restarts >= 3):
                return code if code > 0 else 1
            if code == 0 or code in _FINAL_CODES or worker.is_last:
                self._workers.remove(worker)
            else:
                pause_s = worker.restart_later(now)
                where = f" on {worker.host}" if worker.host else ""
                self._say(f"a process{where} ended with {_describe(code)}; restarting it in {pause_s:g} s")
        return None

    def kill(self, number: int) -> None:
        """Kills a worker that is no longer part of the job: another process takes its place."""
        for worker in self._workers:
            if worker.number == number:
                worker.kill()

    def kill_all(self) -> None:
        for worker in self._workers:
            worker.kill()


def _describe(code: int) -> str:
    return f"exit code {code}" if code > 0 else signal.Signals(-code).name
