"""Starts a job with horovodrun and the settings hvdtrain needs.

    launch/horovodrun.sh -np 4 python -m hvdtrain
    launch/horovodrun.sh -H a:4,b:4 python -m hvdtrain            # over MPI
    launch/horovodrun.sh --gloo -H a:4,b:4 python -m hvdtrain     # without MPI

First checks that the other hosts can be reached. Only variables that a job needs are forwarded (add others with
--env NAME): with Gloo, Horovod's own horovodrun puts its whole environment on a command line that is readable by all
users of the other hosts. What --env names is sent through the input of ssh.
"""

import ipaddress
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import mpi_implementation
from arguments import Job, announce, fail, make_parser, parse_job, run
from open_mpi_settings import with_network_settings

from hvdtrain.system.network import interface_in
from hvdtrain.system.remote_process import forwarded

LAUNCHER = "launch/horovodrun.sh"


def arguments_for(job: Job, open_mpi: Path | None, *, gloo: bool, start_timeout_s: float, verbose: bool) -> list[str]:
    """horovodrun's arguments before the command.

    Args:
        open_mpi: the folder of Open MPI, where other hosts have to find it.
    """
    arguments = ["-np", str(job.ranks), "--start-timeout", str(int(start_timeout_s))]
    if job.hosts:
        arguments += ["-H", ",".join(map(str, job.hosts))]
    if job.network:
        arguments += ["--network-interface", _interface(job.network)]
    if verbose:
        arguments.append("--verbose")
    if gloo:
        return [*arguments, "--gloo"]
    # A shell started by ssh has another PATH.
    return [*arguments, "--mpi", *([] if open_mpi is None else [f"--mpi-args=--prefix {open_mpi}"])]


def _open_mpi() -> Path | None:
    """The folder of the Open MPI on PATH; None for another MPI, which starts its programs by their paths."""
    mpirun = shutil.which("mpirun")
    try:
        is_open_mpi = mpirun is not None and mpi_implementation.of_program(mpirun)[0] == "Open MPI"
    except ValueError:  # horovodrun says which it knows.
        is_open_mpi = False
    return Path(mpirun).parent.parent if mpirun is not None and is_open_mpi else None


def _interface(network: str) -> str:
    """The interface in a network. horovodrun accepts only interfaces, which need the same name on all hosts."""
    try:
        found = interface_in(ipaddress.ip_network(network))
    except ValueError:
        return network
    if found is None:
        fail(LAUNCHER, f"--network must contain an address of this host. Received: {network}")
    return found


def environment(env: Mapping[str, str], job: Job) -> dict[str, str]:
    """The environment to start horovodrun with."""
    chosen = forwarded(env, job.env_names)
    if job.env_names:
        chosen["HVDTRAIN_FORWARDED"] = " ".join(job.env_names)
    return with_network_settings(chosen) if job.is_remote else chosen


def unsendable(job: Job, env: Mapping[str, str]) -> list[str]:
    """The named variables that a shell on another host cannot read from its input, line by line."""
    names = job.env_names if job.is_remote else []
    return [name for name in names if "\n" in env[name] or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII)]


def main() -> None:
    parser = make_parser(LAUNCHER, __doc__)
    parser.add_argument("--gloo", action="store_true", help="use Gloo instead of MPI")
    parser.add_argument("--verbose", action="store_true", help="horovodrun's own --verbose")
    options = parser.parse_args()
    horovodrun = shutil.which("horovodrun")
    if horovodrun is None:
        fail(LAUNCHER, "horovodrun must be on PATH. Received: none", 1)
    job = parse_job(LAUNCHER, options, os.environ)
    if options.gloo and (names := unsendable(job, os.environ)):
        fail(
            LAUNCHER,
            "with --gloo, --env must name variables of one line, whose names a shell accepts. Received: "
            f"{', '.join(names)}. Pass the name of a file that has the value",
        )
    by = f"horovodrun {'with Gloo' if options.gloo else 'with MPI'}"
    notes = ["more ranks than cores on this host: ranks share cores"] if job.oversubscribed else []
    announce(LAUNCHER, job, by, notes)
    arguments = arguments_for(
        job,
        None if options.gloo else _open_mpi(),
        gloo=options.gloo,
        start_timeout_s=options.start_timeout,
        verbose=options.verbose,
    )
    run(LAUNCHER, horovodrun, [horovodrun, *arguments, *job.command], environment(os.environ, job))


if __name__ == "__main__":
    main()
