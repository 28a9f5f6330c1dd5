"""Starts a job with the mpirun on PATH (Open MPI 4 or 5, MPICH, Intel MPI) and the settings hvdtrain needs.

    launch/mpirun.sh -np 4 python -m hvdtrain
    launch/mpirun.sh -H a:4,b:4 python -m hvdtrain
    launch/mpirun.sh --hostfile hosts.txt python -m hvdtrain

First checks that the other hosts can be reached. Output lines are tagged by rank, except on a terminal, where hvdtrain
draws a progress bar. mpirun's exit code is returned and signals are passed on to it. Set options of mpirun itself as
variables (OMPI_MCA_…, I_MPI_…, MPIR_CVAR_…).
"""

import os
import shutil
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import mpi_implementation
from arguments import Job, announce, fail, make_parser, parse_job, run
from open_mpi_settings import with_network_settings

from hvdtrain.system.remote_process import forwarded

LAUNCHER = "launch/mpirun.sh"


def open_mpi(
    job: Job, env: Mapping[str, str], prefix: Path, major: int, *, as_root: bool, tags_output: bool = True
) -> tuple[list[str], list[str]]:
    """mpirun's arguments before the command, and notes to print about them."""
    arguments, notes = ["-np", str(job.ranks), *(["--tag-output"] if tags_output else [])], []
    mapping = "slot"
    if as_root:
        arguments.append("--allow-run-as-root")
        notes.append("as root (--allow-run-as-root)")
    if job.hosts and not job.scheduler:
        arguments += ["-H", ",".join(map(str, job.hosts))]
    if job.oversubscribed:
        notes.append("more ranks than cores on this host: ranks share cores")
    if job.oversubscribed and not job.hosts:
        # Without a host list, slots are cores.
        mapping += ":OVERSUBSCRIBE" if major >= 5 else ""
        arguments += [] if major >= 5 else ["--oversubscribe"]
    # hvdtrain itself divides a host's cores among its ranks.
    arguments += ["--map-by", mapping, "--bind-to", "none"]
    if job.is_remote:
        # Where the other hosts find Open MPI: a shell started by ssh has another PATH.
        arguments += ["--prefix", str(prefix)]
        for name in forwarded(env, job.env_names):
            if not name.startswith("OMPI_MCA_"):  # mpirun forwards these itself
                arguments += ["-x", name]
    if job.network:
        arguments += ["--mca", "btl_tcp_if_include", job.network]
        arguments += ["--prtemca" if major >= 5 else "--mca", "oob_tcp_if_include", job.network]
    return arguments, notes


def hydra(job: Job, env: Mapping[str, str], *, is_intel: bool, tags_output: bool = True) -> tuple[list[str], list[str]]:
    """The arguments and notes for MPICH and Intel MPI."""
    arguments = ["-n", str(job.ranks), *(["-prepend-rank"] if tags_output else [])]
    notes = ["more ranks than cores on this host: ranks share cores"] if job.oversubscribed else []
    if job.hosts and is_intel:
        counts = {host.slots for host in job.hosts}
        if len(counts) > 1:
            fail(
                LAUNCHER,
                f"Intel MPI needs the same number of ranks on each host. Received: {', '.join(map(str, job.hosts))}",
            )
        arguments += ["-hosts", ",".join(host.name for host in job.hosts), "-ppn", str(counts.pop())]
    elif job.hosts:
        arguments += ["-hosts", ",".join(map(str, job.hosts))]
    if job.is_remote:
        arguments += ["-genvlist", ",".join(forwarded(env, job.env_names))]
    if job.network and "/" not in job.network:
        arguments += ["-iface", job.network]
    return arguments, notes


def main() -> None:
    options = make_parser(LAUNCHER, __doc__).parse_args()
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        fail(LAUNCHER, "mpirun must be on PATH. Received: none", 1)
    try:
        name, major = mpi_implementation.of_program(mpirun)
    except ValueError as error:
        fail(LAUNCHER, str(error), 1)
    # With unbuffered output, every write would be tagged like a line. Ranks have terminals, so output is line-buffered.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    job = parse_job(LAUNCHER, options, env, supports_slurm=name == "Open MPI")
    # A tag before each line moves a progress bar out of place; hvdtrain's messages name the rank.
    tags_output = not sys.stdout.isatty()
    if name == "Open MPI":
        env = with_network_settings(env) if job.is_remote else env
        prefix = Path(mpirun).parent.parent
        arguments, notes = open_mpi(job, env, prefix, major, as_root=os.geteuid() == 0, tags_output=tags_output)
    else:
        arguments, notes = hydra(job, env, is_intel=name == "Intel MPI", tags_output=tags_output)
    announce(LAUNCHER, job, f"{name} {major}", notes)
    # Open MPI's mpirun forwards SIGUSR1 and keeps running; after SIGTERM it would kill ranks within two seconds.
    stop_signal = signal.SIGUSR1 if name == "Open MPI" else None
    run(LAUNCHER, mpirun, [mpirun, *arguments, *job.command], env, stop_signal=stop_signal)


if __name__ == "__main__":
    main()
