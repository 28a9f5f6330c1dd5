"""Starts a job by horovodrun, with what hvdtrain needs.

    launch/horovodrun.sh -np 4 python -m hvdtrain
    launch/horovodrun.sh -H a:4,b:4 python -m hvdtrain            # over MPI
    launch/horovodrun.sh --gloo -H a:4,b:4 python -m hvdtrain     # without MPI

Looks whether the other hosts can be reached before it starts anything. Only variables that a job needs come with it
(--env NAME for others): with Gloo, horovodrun writes all it has into a command line that everybody on the other hosts
can read.
"""

import ipaddress
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from arguments import Job, announce, parser, read, run
from hosts import between_hosts, fail, handed_on, interface_in

LAUNCHER = "launch/horovodrun.sh"


def arguments_for(job: Job, mpi: Path, *, gloo: bool, start_timeout_s: float, verbose: bool) -> list[str]:
    """horovodrun's arguments before the command."""
    arguments = ["-np", str(job.ranks), "--start-timeout", str(int(start_timeout_s))]
    if job.hosts:
        arguments += ["-H", ",".join(map(str, job.hosts))]
    if job.network:
        arguments += ["--network-interface", _interface(job.network)]
    if verbose:
        arguments.append("--verbose")
    if gloo:
        return [*arguments, "--gloo"]
    # Where the other hosts find Open MPI; ssh's shell has not the same PATH.
    return [*arguments, "--mpi", *([f"--mpi-args=--prefix {mpi}"] if job.is_remote else [])]


def _interface(network: str) -> str:
    """horovodrun takes interfaces only, which must have the same name on all hosts."""
    try:
        found = interface_in(ipaddress.ip_network(network))
    except ValueError:
        return network
    if found is None:
        fail(LAUNCHER, f"--network must be one that this host is part of. Received: {network}")
    return found


def environment(env: Mapping[str, str], job: Job) -> dict[str, str]:
    """The variables that horovodrun is started with."""
    handed = {name: env[name] for name in handed_on(env, job.handed_on)}
    return between_hosts(handed) if job.is_remote else handed


def main() -> None:
    options = parser(LAUNCHER, __doc__)
    options.add_argument("--gloo", action="store_true", help="without MPI")
    options.add_argument("--verbose", action="store_true", help="what horovodrun does")
    given = options.parse_args()
    horovodrun = shutil.which("horovodrun")
    if horovodrun is None:
        fail(LAUNCHER, "there must be a horovodrun on PATH. Received: none", 1)
    job = read(LAUNCHER, given, os.environ)
    by = f"horovodrun {'with Gloo' if given.gloo else 'with MPI'}"
    notes = ["more ranks than cores on this host: they share them"] if job.oversubscribed else []
    announce(LAUNCHER, job, by, notes)
    mpi = Path(shutil.which("mpirun") or horovodrun).parent.parent
    arguments = arguments_for(job, mpi, gloo=given.gloo, start_timeout_s=given.start_timeout, verbose=given.verbose)
    run(LAUNCHER, horovodrun, [horovodrun, *arguments, *job.command], environment(os.environ, job))


if __name__ == "__main__":
    main()
