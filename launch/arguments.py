"""What both launchers are told, checked before anything is started."""

import argparse
import dataclasses
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from hosts import Host, fail, find_problems, network_to, others, read_hosts, slurm_hosts, spread
from restarts import Options, supervise


@dataclasses.dataclass(frozen=True)
class Job:
    """A command and where its ranks go."""

    command: list[str]
    hosts: list[Host]
    """Empty: this host alone."""
    ranks: int
    network: str | None
    """``10.1.0.0/16`` or an interface; None: one host, or the launcher's choice."""
    handed_on: list[str]
    """Variables that were asked for by name."""
    scheduler: str | None = None
    """Who has given the hosts to this job and starts processes on them; None: they were named, and ssh does."""

    @property
    def is_remote(self) -> bool:
        """Whether there are other hosts than this one."""
        return bool(others(self.hosts))

    @property
    def oversubscribed(self) -> bool:
        """Whether this host, the only one whose cores are known here, gets more ranks than it has cores."""
        here = sum(host.slots for host in self.hosts if not others([host])) if self.hosts else self.ranks
        return here > len(os.sched_getaffinity(0))


def parser(launcher: str, description: str | None) -> argparse.ArgumentParser:
    """The options of both launchers."""
    made = argparse.ArgumentParser(
        prog=launcher, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("-np", type=int, metavar="N", help="ranks; default: as many as the hosts take")
    where = made.add_mutually_exclusive_group()
    where.add_argument(
        "-H", "--hosts", metavar="a:4,b:4", help="hosts and how many ranks each takes; default: this one"
    )
    where.add_argument("--hostfile", type=Path, metavar="FILE", help="the same, a line each: a slots=4")
    made.add_argument(
        "--network", metavar="NAME", help="the network between hosts: 10.1.0.0/16, or an interface such as ib0"
    )
    made.add_argument(
        "--env", action="append", default=[], metavar="NAME", help="a variable that all ranks are to have, too"
    )
    made.add_argument(
        "--start-timeout", type=float, default=30.0, metavar="SECONDS", help="how long a host may take to answer (30)"
    )
    made.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND")
    return made


def read(launcher: str, given: argparse.Namespace, env: Mapping[str, str], *, knows_slurm: bool = False) -> Job:
    """The job that was asked for; ends with exit code 64 where it cannot be, and 1 where hosts are not ready.

    Args:
        knows_slurm: the launcher has Slurm start its processes on the other hosts of an allocation, without ssh.
    """
    if not given.command:
        fail(launcher, f"a command is missing. For example: {launcher} -np 2 python -m hvdtrain")
    if absent := [name for name in given.env if name not in env]:
        fail(launcher, f"--env must name variables that are set. Received: {', '.join(absent)}")
    try:
        text = given.hosts or (given.hostfile.read_text() if given.hostfile else "")
        hosts = read_hosts(text)
        if given.np is not None and given.np < 1:
            raise ValueError(f"-np must be at least 1. Received: {given.np}")
        allocated = not text and "SLURM_JOB_NODELIST" in env
        if allocated:
            hosts = slurm_hosts(env)
        if given.hostfile and not hosts:
            raise ValueError(f"the file of hosts must name some. Received: {given.hostfile}, which names none")
        ranks = given.np or sum(host.slots for host in hosts) or 1
        hosts = spread(hosts, ranks) if hosts else []
    except (ValueError, OSError) as error:
        fail(launcher, str(error))
    far = others(hosts)
    scheduler = "Slurm" if allocated and knows_slurm else None
    if scheduler is None and (problems := find_problems(far, Path(sys.executable), given.start_timeout)):
        for problem in problems:
            print(f"{launcher}: {problem}", file=sys.stderr, flush=True)
        raise SystemExit(1)
    network = given.network or (network_to(far[0]) if far else None)
    return Job(given.command, hosts, ranks, network, given.env, scheduler)


def announce(launcher: str, job: Job, by: str, notes: list[str]) -> None:
    """Says on stderr what is about to be started, and what was added that somebody might not expect."""
    where = f"on {', '.join(map(str, job.hosts))}" if job.hosts else "on this host"
    over = f" over {job.network}" if job.network else ""
    given = f", which {job.scheduler} has given" if job.scheduler else ""
    print(f"{launcher}: {job.ranks} rank(s) {where}{given}{over} by {by}", file=sys.stderr, flush=True)
    for note in notes:
        print(f"{launcher}: {note}", file=sys.stderr, flush=True)


def run(
    launcher: str, program: str, command: list[str], env: Mapping[str, str], *, stop_signal: int | None = None
) -> NoReturn:
    """Becomes the launcher, where somebody looks after the job already, or looks after it until its end.

    Args:
        stop_signal: one that the launcher passes on to all ranks.
    """
    if "HVDTRAIN_SUPERVISOR_FILE" in env:
        os.execve(program, command, dict(env))

    def say(message: str) -> None:
        print(f"{launcher}: {message}", file=sys.stderr, flush=True)

    options = Options(restarts=0, pause_s=0.0)
    raise SystemExit(supervise(program, command, env, options, say, stop_signal=stop_signal))
