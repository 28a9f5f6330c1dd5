"""The hosts of a job, for the launchers: who they are, whether they can be reached, and by which network."""

import fcntl
import ipaddress
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, NoReturn

_SIOCGIFADDR, _SIOCGIFNETMASK = 0x8915, 0x891B
# What a job may need of the environment it is started from. All else, secrets among it, stays where it is.
HANDED_ON = re.compile(
    r"PATH|LD_LIBRARY_PATH|VIRTUAL_ENV|LANG|LC_.*|TZ|HOME|TMPDIR|PYTHON.*|HVDTRAIN_.*|HOROVOD_.*|NCCL_.*|"
    r"CUDA_VISIBLE_DEVICES|TF_.*|XLA_.*|KERAS_.*|OMP_.*|OMPI_MCA_.*|FI_.*|I_MPI_.*|MPIR_CVAR_.*|UCX_.*|OPAL_PREFIX|"
    r"NO_COLOR|TERM"
)
# How Open MPI sends long messages over TCP. MPI_Allreduce of 16 MiB on two hosts reached 0.61 of a link of 100 Mbit/s
# in its own way and 0.94 in this one, of 1 Gbit/s 0.60 and 0.86; where nothing but the cores sets a limit, on one host,
# its own way is a third faster.
_OPEN_MPI_OVER_TCP = {"OMPI_MCA_btl_tcp_flags": "send"}
# How it adds up. MPI_Allreduce of 16 MiB on links of 100 Mbit/s, its own way and this one: on 3 hosts 4.5 and 2.2 s, on
# 4 hosts 3.1 and 2.7 s. Between ranks of one host its own way is the faster one.
_OPEN_MPI_RING = {
    "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
    "OMPI_MCA_coll_tuned_dynamic_rules_filename": str(Path(__file__).with_name("open_mpi_allreduce.rules")),
}


class Host(NamedTuple):
    """A host and how many ranks it takes."""

    name: str
    slots: int

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}"


def fail(launcher: str, message: str, code: int = 64) -> NoReturn:
    print(f"{launcher}: {message}", file=sys.stderr, flush=True)
    raise SystemExit(code)


def read_hosts(text: str) -> list[Host]:
    """Hosts as ``a:4,b:4``, or as the lines of a file: ``a slots=4``, ``a:4`` or ``a``, with comments behind ``#``.

    Raises:
        ValueError: a part is none of these, or a host comes twice.
    """
    hosts: dict[str, int] = {}
    for part in re.split(r"[,\n]", re.sub(r"#.*", "", text)):
        if not part.strip():
            continue
        match = re.fullmatch(
            r"([\w.\-]+)(?:\s*:\s*(\d+)|\s+slots\s*=\s*(\d+))?(?:\s+max.slots\s*=\s*\d+)?", part.strip()
        )
        if match is None or match[1] in hosts or (slots := int(match[2] or match[3] or 1)) < 1:
            raise ValueError(
                "hosts must be given as a:4,b:4, or in a file, a line each: a slots=4; each once, and with a rank. "
                f"Received: {part.strip()}"
            )
        hosts[match[1]] = slots
    return [Host(name, slots) for name, slots in hosts.items()]


def slurm_hosts(env: Mapping[str, str]) -> list[Host]:
    """The hosts of the allocation that this process runs in, with its tasks on each.

    Raises:
        ValueError: Slurm does not say.
    """
    nodes = env["SLURM_JOB_NODELIST"]
    try:
        shown = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(f"scontrol must tell the hosts of the allocation {nodes}. Received: {error}") from None
    tasks: list[int] = []
    for part in env.get("SLURM_TASKS_PER_NODE", "1").split(","):  # 4(x2),3
        count, _, times = part.rstrip(")").partition("(x")
        tasks += [int(count)] * int(times or 1)
    return [Host(name, slots) for name, slots in zip(shown.stdout.split(), tasks, strict=False)]


def spread(hosts: list[Host], ranks: int) -> list[Host]:
    """The first hosts that take this many ranks, the last of them only as many as are left.

    Raises:
        ValueError: they have fewer slots.
    """
    taken, left = [], ranks
    for host in hosts:
        if left:
            taken.append(Host(host.name, min(host.slots, left)))
            left -= taken[-1].slots
    if left:
        raise ValueError(
            f"-np must be at most the number of slots of all hosts. Received: {ranks} ranks on "
            f"{', '.join(map(str, hosts))}. Give a host more: {hosts[0].name}:{hosts[0].slots + left}"
        )
    return taken


def others(hosts: Iterable[Host]) -> list[str]:
    """The names of those that are not this host."""
    own = {"localhost", socket.gethostname(), socket.gethostname().partition(".")[0]}
    own |= {address for address, _ in _interfaces().values()}
    return [host.name for host in hosts if host.name not in own]


def find_problems(names: list[str], python: Path, timeout_s: float) -> list[str]:
    """What keeps a job from being started on other hosts, a line for each host with a problem."""
    with ThreadPoolExecutor(max(1, len(names))) as threads:
        found = threads.map(lambda name: _problem(name, python, timeout_s), names)
    return [problem for problem in found if problem]


def _problem(name: str, python: Path, timeout_s: float) -> str | None:
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={max(1, int(timeout_s))}"]
    command = ["ssh", *options, name, f"test -x '{python}' || echo absent"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s + 2, check=False
        )
    except FileNotFoundError:
        return f"host {name} is reached by ssh, which is not installed here (Debian: openssh-client)."
    except subprocess.TimeoutExpired:
        return f"host {name} did not answer within {timeout_s:g} s."
    if done.returncode != 0:
        told = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        return f"host {name} must let ssh in without a question. Received: {_telling(told) or 'nothing'}"
    if "absent" in done.stdout:
        return (
            f"host {name} must have the same environment in the same place. Received: no {python} there. Put the "
            "checkout on a file system that all hosts see, or call launch/run true in a copy on each."
        )
    return None


def _telling(lines: list[str]) -> str:
    """The line that names the cause: with a changed host key, the last one only says that it failed."""
    for sign in ("IDENTIFICATION HAS CHANGED", "host key is known", "Permission denied"):
        for line in lines:
            if sign in line:
                return line.strip("@ ")
    return lines[-1] if lines else ""


def network_to(name: str) -> str | None:
    """The network that leads from here to a host: ``10.1.0.0/16``, or the interface's name behind a router."""
    try:
        there = socket.gethostbyname(name)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((there, 9))  # sends nothing
            own = probe.getsockname()[0]
    except OSError:
        return None
    for interface, (address, network) in _interfaces().items():
        if address == own:
            return str(network) if ipaddress.ip_address(there) in network else interface
    return None


def interface_in(network: ipaddress.IPv4Network | ipaddress.IPv6Network) -> str | None:
    """This host's interface with an address in a network."""
    addresses = {name: address for name, (address, _) in _interfaces().items()}
    return next((name for name, each in addresses.items() if ipaddress.ip_address(each) in network), None)


def _interfaces() -> dict[str, tuple[str, ipaddress.IPv4Network]]:
    """The address of each interface that has one, and the network it is in."""
    found = {}
    for _, name in socket.if_nameindex():
        address, mask = _of_interface(name, _SIOCGIFADDR), _of_interface(name, _SIOCGIFNETMASK)
        if address is not None and mask is not None:
            found[name] = address, ipaddress.IPv4Network(f"{address}/{mask}", strict=False)
    return found


def _of_interface(name: str, what: int) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), what, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def between_hosts(env: Mapping[str, str]) -> dict[str, str]:
    """The environment of a launcher that is to start ranks on other hosts; what is set already stays."""
    is_chosen = any(name.startswith("OMPI_MCA_coll_tuned_") for name in env)
    return {**_OPEN_MPI_OVER_TCP, **({} if is_chosen else _OPEN_MPI_RING), **env}


def handed_on(env: Mapping[str, str], more: Iterable[str] = ()) -> list[str]:
    """The names of the variables that a job gets on all hosts: those it may need, and those asked for."""
    return sorted({*filter(HANDED_ON.fullmatch, env), *more})
