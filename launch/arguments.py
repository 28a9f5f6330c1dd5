"""Command line of both launchers, validated before anything is started."""

import argparse
import dataclasses
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from restarts import Options, supervise

from hvdtrain.system.hosts import Host, find_problems, read_hosts, remote_names, slurm_hosts, spread
from hvdtrain.system.network import network_to


@dataclasses.dataclass(frozen=True)
class Job:
    """A command and the hosts of its ranks."""

    command: list[str]
    hosts: list[Host]
    """Empty: only this host."""
    ranks: int
    network: str | None
    """``10.1.0.0/16`` or an interface; None: a single host, or chosen by the launcher."""
    env_names: list[str]
    """Additional variables to forward (``--env``)."""
    scheduler: str | None = None
    """The scheduler that allocated the hosts and starts processes on them; None: ssh does."""

    @property
    def is_remote(self) -> bool:
        """Whether the job uses other hosts than this one."""
        return bool(remote_names(self.hosts))

    @property
    def oversubscribed(self) -> bool:
        """Whether this host gets more ranks than cores; the cores of other hosts are not known here."""
        here = sum(host.slots for host in self.hosts if not remote_names([host])) if self.hosts else self.ranks
        return here > len(os.sched_getaffinity(0))


def fail(launcher: str, message: str, code: int = 64) -> NoReturn:
    print(f"{launcher}: {message}", file=sys.stderr, flush=True)
    raise SystemExit(code)


def make_parser(launcher: str, description: str | None) -> argparse.ArgumentParser:
    """The options of both launchers."""
    parser = argparse.ArgumentParser(
        prog=launcher, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-np", type=int, metavar="N", help="number of ranks; default: the sum of all slots")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("-H", "--hosts", metavar="a:4,b:4", help="hosts and their slots; default: this host")
    where.add_argument("--hostfile", type=Path, metavar="FILE", help="the same, one host per line: a slots=4")
    parser.add_argument(
        "--network", metavar="NAME", help="the network between hosts: 10.1.0.0/16, or an interface such as ib0"
    )
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME", help="forward another variable to all ranks"
    )
    parser.add_argument(
        "--start-timeout", type=float, default=30.0, metavar="SECONDS", help="time for a host to respond (30)"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND")
    return parser


def parse_job(
    launcher: str, options: argparse.Namespace, env: Mapping[str, str], *, supports_slurm: bool = False
) -> Job:
    """Validates the options. Exits with code 64 if they are invalid, with 1 if a host is not ready.

    Args:
        supports_slurm: the launcher starts processes on the other hosts of an allocation through Slurm, not ssh.
    """
    if not options.command:
        fail(launcher, f"a command is missing. For example: {launcher} -np 2 python -m hvdtrain")
    if absent := [name for name in options.env if name not in env]:
        fail(launcher, f"--env must name variables that are set. Received: {', '.join(absent)}")
    try:
        text = options.hosts or (options.hostfile.read_text() if options.hostfile else "")
        hosts = read_hosts(text)
        if options.np is not None and options.np < 1:
            raise ValueError(f"-np must be at least 1. Received: {options.np}")
        allocated = not text and "SLURM_JOB_NODELIST" in env
        if allocated:
            hosts = slurm_hosts(env)
        if options.hostfile and not hosts:
            raise ValueError(f"the hostfile must name at least one host. Received: {options.hostfile}, which is empty")
        ranks = options.np or sum(host.slots for host in hosts) or 1
        hosts = spread(hosts, ranks) if hosts else []
    except (ValueError, OSError) as error:
        fail(launcher, str(error))
    remote = remote_names(hosts)
    scheduler = "Slurm" if allocated and supports_slurm else None
    if scheduler is None and (problems := find_problems(remote, Path(sys.executable), options.start_timeout)):
        for problem in problems:
            print(f"{launcher}: {problem}", file=sys.stderr, flush=True)
        raise SystemExit(1)
    network = options.network or (network_to(remote[0]) if remote else None)
    return Job(options.command, hosts, ranks, network, options.env, scheduler)


def announce(launcher: str, job: Job, by: str, notes: list[str]) -> None:
    """Prints to stderr what is about to be started and which unexpected options were added."""
    where = f"on {', '.join(map(str, job.hosts))}" if job.hosts else "on this host"
    over = f" over {job.network}" if job.network else ""
    allocated = f" allocated by {job.scheduler}" if job.scheduler else ""
    print(f"{launcher}: {job.ranks} rank(s) {where}{allocated}{over} by {by}", file=sys.stderr, flush=True)
    for note in notes:
        print(f"{launcher}: {note}", file=sys.stderr, flush=True)


def run(
    launcher: str, program: str, command: list[str], env: Mapping[str, str], *, stop_signal: int | None = None
) -> NoReturn:
    """Runs the launcher under supervision, or replaces this process by it if the job is already supervised.

    Args:
        stop_signal: a signal that the launcher forwards to all ranks.
    """
    if "HVDTRAIN_SUPERVISOR_FILE" in env:
        os.execve(program, command, dict(env))

    def say(message: str) -> None:
        print(f"{launcher}: {message}", file=sys.stderr, flush=True)

    options = Options(restarts=0, pause_s=0.0)
    raise SystemExit(supervise(program, command, env, options, say, stop_signal=stop_signal))
