"""``hvdtrain elastic``: starts processes that train together, and continues when some die, leave or join."""

import os
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hvdtrain.commands.elastic_workers import HostList, Worker, Workers
from hvdtrain.config.fields import broken_rule
from hvdtrain.errors import StoppedEarly, UsageError
from hvdtrain.fault_tolerance.elastic.coordinator import Coordinator
from hvdtrain.fault_tolerance.elastic.membership import Membership
from hvdtrain.system import environment, network, remote_process

_FLAGS_WITH_VALUE = ("--np", "--hosts", "-H", "--hostfile", "--address", "--port", "--env", "--timeout")
_POLL_S = 0.05
_END_S = 60.0
"""How long processes may take to end after the job has ended."""


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


def run(
    command: Sequence[str],
    *,
    members: str,
    np: int | None = None,
    hosts: str | None = None,
    hostfile: Path | None = None,
    address: str = "",
    port: int = 0,
    env: Sequence[str] | None = None,
    timeout: float = 600.0,
) -> int:
    """Returns the exit code of the job.

    Args:
        members: ``MIN:MAX``.
        np: number of processes to start (default: MAX, or the sum of all slots).
        hosts, hostfile: where to start them; see :class:`HostList`.
        address, port: where to listen.
        env: names of variables to forward to other hosts.
        timeout: seconds that fewer than MIN members wait for others.

    Raises:
        UsageError: an option breaks its rule.
        HvdtrainError: a host is not ready.
    """
    least, _, most = members.partition(":")
    if not (least.isdigit() and most.isdigit() and 1 <= int(least) <= int(most)):
        raise UsageError(f"MIN:MAX must be two whole numbers, 1 <= MIN <= MAX. Received: {members!r}")
    if timeout < 0:
        raise broken_rule("timeout", "at least 0", timeout)
    if not 0 <= port < 65536:
        raise broken_rule("port", "from 0 to 65535", port)
    if absent := [name for name in env or [] if environment.get(name) is None]:
        raise broken_rule("env", "the name of a variable that is set", absent[0])
    num_processes = int(most) if np is None else np
    if not 0 <= num_processes <= int(most):
        raise broken_rule("np", f"from 0 to MAX, {most}", np)
    if num_processes and not command:
        raise UsageError("a command is missing. For example: hvdtrain elastic 2:4 python -m hvdtrain")
    host_list = HostList(hosts, hostfile, here=num_processes)
    if np is not None and np > host_list.num_slots:
        raise broken_rule("np", f"at most the sum of all slots, {host_list.num_slots}", np)
    return ElasticJob(
        Membership(int(least), int(most)),
        command,
        host_list,
        num_processes=num_processes,
        timeout_s=timeout,
        address=address,
        port=port,
        env_names=env or [],
    ).run()


def _say(text: str) -> None:
    print(f"hvdtrain elastic: {text}", file=sys.stderr, flush=True)
