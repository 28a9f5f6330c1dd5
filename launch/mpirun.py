"""Starts a job by the mpirun on PATH, with what hvdtrain needs: Open MPI 4 or 5, MPICH, Intel MPI.

    launch/mpirun.sh -np 4 python -m hvdtrain
    launch/mpirun.sh -H a:4,b:4 python -m hvdtrain
    launch/mpirun.sh --hostfile hosts.txt python -m hvdtrain

Looks whether the other hosts can be reached before it starts anything. Lines are tagged by rank; the exit code and
signals are mpirun's. Options for mpirun itself: as variables (OMPI_MCA_…, I_MPI_…, MPIR_CVAR_…).
"""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

from arguments import Job, announce, parser, read, run
from hosts import between_hosts, fail, handed_on

LAUNCHER = "launch/mpirun.sh"


def implementation(version: str) -> tuple[str, int]:
    """The MPI and its major version, by what ``mpirun --version`` says.

    Raises:
        ValueError: it is none that is known.
    """
    for name, pattern in (
        ("Open MPI", r"\(Open MPI\) (\d+)\."),
        ("Open MPI", r"\(PRRTE\) (\d+)\."),
        ("Intel MPI", r"Intel\(R\) MPI Library .*Version (\d+)"),
        ("MPICH", r"HYDRA build details:\s+Version:\s+(\d+)\."),
    ):
        if match := re.search(pattern, version):
            # Open MPI 5's launcher tells the version of its runtime, which is 3 or later.
            return name, max(5, int(match[1])) if "PRRTE" in pattern else int(match[1])
    raise ValueError("mpirun must be Open MPI's (4 or 5), MPICH's or Intel MPI's. Received: " + version.strip()[:200])


def open_mpi(
    job: Job, env: Mapping[str, str], prefix: Path, major: int, *, as_root: bool
) -> tuple[list[str], list[str]]:
    """mpirun's arguments before the command, and what to tell about them."""
    arguments, notes = ["-np", str(job.ranks), "--tag-output"], []
    mapping = "slot"
    if as_root:
        arguments.append("--allow-run-as-root")
        notes.append("as root (--allow-run-as-root)")
    if job.hosts and not job.scheduler:
        arguments += ["-H", ",".join(map(str, job.hosts))]
    if job.oversubscribed:
        notes.append("more ranks than cores on this host: they share them")
    if job.oversubscribed and not job.hosts:
        # Without hosts, slots are cores.
        mapping += ":OVERSUBSCRIBE" if major >= 5 else ""
        arguments += [] if major >= 5 else ["--oversubscribe"]
    # hvdtrain shares the cores of a host out among its ranks.
    arguments += ["--map-by", mapping, "--bind-to", "none"]
    if job.is_remote:
        # Where the other hosts find Open MPI; ssh's shell has not the same PATH.
        arguments += ["--prefix", str(prefix)]
        for name in handed_on(env, job.handed_on):
            if not name.startswith("OMPI_MCA_"):  # mpirun hands these on by itself
                arguments += ["-x", name]
    if job.network:
        arguments += ["--mca", "btl_tcp_if_include", job.network]
        arguments += ["--prtemca" if major >= 5 else "--mca", "oob_tcp_if_include", job.network]
    return arguments, notes


def hydra(job: Job, env: Mapping[str, str], *, is_intel: bool) -> tuple[list[str], list[str]]:
    """The same for MPICH and Intel MPI."""
    arguments = ["-n", str(job.ranks), "-prepend-rank"]
    notes = ["more ranks than cores on this host: they share them"] if job.oversubscribed else []
    if job.hosts and is_intel:
        counts = {host.slots for host in job.hosts}
        if len(counts) > 1:
            fail(LAUNCHER, f"Intel MPI needs as many ranks on each host. Received: {', '.join(map(str, job.hosts))}")
        arguments += ["-hosts", ",".join(host.name for host in job.hosts), "-ppn", str(counts.pop())]
    elif job.hosts:
        arguments += ["-hosts", ",".join(map(str, job.hosts))]
    if job.is_remote:
        arguments += ["-genvlist", ",".join(handed_on(env, job.handed_on))]
    if job.network and "/" not in job.network:
        arguments += ["-iface", job.network]
    return arguments, notes


def main() -> None:
    given = parser(LAUNCHER, __doc__).parse_args()
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        fail(LAUNCHER, "there must be an mpirun on PATH. Received: none", 1)
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False)
    try:
        name, major = implementation(version.stdout + version.stderr)
    except ValueError as error:
        fail(LAUNCHER, str(error), 1)
    # Each piece that Python writes unbuffered would be tagged like a line. Ranks have terminals: lines come at once.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    job = read(LAUNCHER, given, env, knows_slurm=name == "Open MPI")
    if name == "Open MPI":
        env = between_hosts(env) if job.is_remote else env
        prefix = Path(mpirun).parent.parent
        arguments, notes = open_mpi(job, env, prefix, major, as_root=os.geteuid() == 0)
    else:
        arguments, notes = hydra(job, env, is_intel=name == "Intel MPI")
    announce(LAUNCHER, job, f"{name} {major}", notes)
    # Open MPI's mpirun passes it on and goes on; SIGTERM would leave ranks two seconds.
    stop_signal = signal.SIGUSR1 if name == "Open MPI" else None
    run(LAUNCHER, mpirun, [mpirun, *arguments, *job.command], env, stop_signal=stop_signal)


if __name__ == "__main__":
    main()
