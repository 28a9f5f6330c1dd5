"""The process that ``hvdtrain elastic`` runs: the coordinator, and the processes that it starts."""

import os
import secrets
import shlex
import signal
import time
from collections.abc import Sequence

from hvdtrain.errors import StoppedEarly
from hvdtrain.fault_tolerance.elastic.coordinator import Coordinator
from hvdtrain.fault_tolerance.elastic.host_list import HostList
from hvdtrain.fault_tolerance.elastic.membership import Membership
from hvdtrain.fault_tolerance.elastic.workers import Worker, Workers
from hvdtrain.system import environment, network, remote_process
from hvdtrain.system.terminal import write

_POLL_S = 0.05
_END_S = 60.0
"""How long processes may take to end after the job has ended."""


class ElasticJob:
    """The coordinator of a job and the processes that it starts.

    Args:
        num_processes: the most processes that it starts.
        timeout_s: see :class:`Coordinator`.
        address: where to listen; empty: where the other hosts reach this one, if there are any.
        env_names: additional variables to forward to other hosts.
    """

    def __init__(
        self,
        membership: Membership,
        command: Sequence[str],
        hosts: HostList,
        *,
        num_processes: int,
        timeout_s: float,
        address: str,
        port: int,
        env_names: Sequence[str],
    ):
        self._token = environment.elastic_token() or secrets.token_hex(16)
        address = address or (network.address_towards(hosts.remote[0]) if hosts.remote else None) or "127.0.0.1"
        num_first = min(num_processes, hosts.num_slots)
        self._coordinator = Coordinator(
            membership,
            token=self._token,
            start_size=max(num_first, membership.minimum),
            timeout_s=timeout_s,
            endpoint=(address, port),
            say=_say,
            on_removed=lambda worker: self._workers.kill(worker),
        )
        self._command = command
        self._endpoint = f"{address}:{self._coordinator.port}"
        self._env_names = env_names
        self._workers = Workers(self._make_worker, hosts, num_processes, _say)
        self._num_signals = 0
        where = f" on {', '.join(map(str, hosts.hosts))}" if hosts.remote else ""
        what = f"{num_first} process(es) of {shlex.join(command)}{where}; others" if num_first else "processes"
        _say(f"{what} join at {self._endpoint}")

    def _make_worker(self, number: int, host: str | None) -> Worker:
        env = environment.launch_environment()
        if host is not None:
            env = remote_process.forwarded(env, self._env_names)
        variables = environment.elastic_variables(self._endpoint, self._token, number)
        return Worker(number, host, self._command, {**env, **variables})

    def run(self) -> int:
        """Returns the exit code of the job."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._handle_signal)
        coordinator, workers = self._coordinator, self._workers
        waits_for_others = not len(workers)
        try:
            while coordinator.exit_code is None:
                now = time.monotonic()
                for worker in workers.follow_hosts(now):
                    coordinator.ask_to_leave(worker, "its host was taken from the job")
                coordinator.exit_code = workers.start_and_reap(now, has_trained=coordinator.generation > 0)
                if not (len(workers) or len(coordinator.peers) or waits_for_others):
                    coordinator.exit_code = 1
                coordinator.poll(_POLL_S)
            return self._end(coordinator.exit_code)
        finally:
            coordinator.close()
            workers.kill_all()

    def _end(self, code: int) -> int:
        coordinator = self._coordinator
        _say(f"exit code {code} after {coordinator.generation} generation(s); {coordinator.lost} rank(s) were lost")
        until = time.monotonic() + _END_S
        while time.monotonic() < until and self._workers.num_running:
            coordinator.poll(_POLL_S)
        return code

    def _handle_signal(self, number: int, frame: object) -> None:
        self._num_signals += 1
        if self._num_signals == 1:
            self._coordinator.stop(f"{signal.Signals(number).name} to hvdtrain elastic")
        elif self._num_signals > 2:
            self._workers.kill_all()
            os._exit(StoppedEarly.exit_code)


def _say(text: str) -> None:
    write(f"hvdtrain elastic: {text}")  # If nobody can read it, the job continues.
