"""Hosts of a job, for the launchers: parsing host lists, checking that hosts are ready, finding the network."""

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

from horovod.runner.forwarded import FORWARDED

_SIOCGIFADDR, _SIOCGIFNETMASK = 0x8915, 0x891B
# Protocol for long messages over TCP. MPI_Allreduce of 16 MiB on two hosts reached 0.61 of a 100 Mbit/s link with Open
# MPI's default and 0.94 with this setting (1 Gbit/s: 0.60 and 0.86). On a single host, limited only by the cores, the
# default is a third faster.
_OPEN_MPI_TCP = {"OMPI_MCA_btl_tcp_flags": "send"}
# Reduction algorithm. MPI_Allreduce of 16 MiB on 100 Mbit/s links, default and these rules: 4.5 and 2.2 s on 3 hosts,
# 3.1 and 2.7 s on 4 hosts. Between ranks of one host the default is faster.
_OPEN_MPI_RING = {
    "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
    "OMPI_MCA_coll_tuned_dynamic_rules_filename": str(Path(__file__).with_name("open_mpi_allreduce.rules")),
}


class Host(NamedTuple):
    """A host and its slots: the number of ranks it can run."""

    name: str
    slots: int

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}"


def fail(launcher: str, message: str, code: int = 64) -> NoReturn:
    print(f"{launcher}: {message}", file=sys.stderr, flush=True)
    raise SystemExit(code)


def read_hosts(text: str) -> list[Host]:
    """Parses hosts from ``a:4,b:4``, or from lines ``a slots=4``, ``a:4`` or ``a``, with comments after ``#``.

    Raises:
        ValueError: an entry is malformed, or a host occurs twice.
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
                "hosts must have the form a:4,b:4, or in a file, one per line, a slots=4; each once, with a slot. "
                f"Received: {part.strip()}"
            )
        hosts[match[1]] = slots
    return [Host(name, slots) for name, slots in hosts.items()]


def slurm_hosts(env: Mapping[str, str]) -> list[Host]:
    """The hosts of this process's Slurm allocation, with the number of tasks on each as slots.

    Raises:
        ValueError: ``scontrol`` fails.
    """
    nodes = env["SLURM_JOB_NODELIST"]
    try:
        shown = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(f"scontrol must list the hosts of the allocation {nodes}. Received: {error}") from None
    tasks: list[int] = []
    for part in env.get("SLURM_TASKS_PER_NODE", "1").split(","):  # 4(x2),3
        count, _, times = part.rstrip(")").partition("(x")
        tasks += [int(count)] * int(times or 1)
    return [Host(name, slots) for name, slots in zip(shown.stdout.split(), tasks, strict=False)]


def spread(hosts: list[Host], ranks: int) -> list[Host]:
    """Fills hosts in order until all ranks have a slot.

    Raises:
        ValueError: there are fewer slots than ranks.
    """
    taken, left = [], ranks
    for host in hosts:
        if left:
            taken.append(Host(host.name, min(host.slots, left)))
            left -= taken[-1].slots
    if left:
        raise ValueError(
            f"-np must be at most the sum of all slots. Received: {ranks} ranks on {', '.join(map(str, hosts))}. "
            f"Increase the slots of a host: {hosts[0].name}:{hosts[0].slots + left}"
        )
    return taken


def remote_names(hosts: Iterable[Host]) -> list[str]:
    """The names of the hosts that are not this host."""
    own = {"localhost", socket.gethostname(), socket.gethostname().partition(".")[0]}
    own |= {address for address, _ in _interfaces().values()}
    return [host.name for host in hosts if host.name not in own]


def find_problems(names: list[str], python: Path, timeout_s: float) -> list[str]:
    """Checks that a job can be started on other hosts; returns a line for each host with a problem."""
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
        return f"ssh is needed to reach host {name} and must be installed here (Debian: openssh-client)."
    except subprocess.TimeoutExpired:
        return f"host {name} did not answer within {timeout_s:g} s."
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        return f"host {name} must accept ssh without a prompt. Received: {_cause(lines) or 'no message'}"
    if "absent" in done.stdout:
        return (
            f"host {name} must have the same environment at the same path. Received: no {python} there. Put the "
            "checkout on a file system shared by all hosts, or run launch/run true in a copy on each."
        )
    return None


def _cause(lines: list[str]) -> str:
    """The line of ssh's output that names the cause: with a changed host key, it is not the last one."""
    for sign in ("IDENTIFICATION HAS CHANGED", "host key is known", "Permission denied"):
        for line in lines:
            if sign in line:
                return line.strip("@ ")
    return lines[-1] if lines else ""


def network_to(name: str) -> str | None:
    """The network that connects this host to another: ``10.1.0.0/16``, or the interface if it leads to a router."""
    try:
        address_there = socket.gethostbyname(name)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address_there, 9))  # sends no packet
            own = probe.getsockname()[0]
    except OSError:
        return None
    for interface, (address, network) in _interfaces().items():
        if address == own:
            return str(network) if ipaddress.ip_address(address_there) in network else interface
    return None


def interface_in(network: ipaddress.IPv4Network | ipaddress.IPv6Network) -> str | None:
    """The interface of this host whose address is in a network."""
    addresses = {name: address for name, (address, _) in _interfaces().items()}
    return next((name for name, each in addresses.items() if ipaddress.ip_address(each) in network), None)


def _interfaces() -> dict[str, tuple[str, ipaddress.IPv4Network]]:
    """Maps each interface with an IPv4 address to that address and its network."""
    found = {}
    for _, name in socket.if_nameindex():
        address, mask = _interface_address(name, _SIOCGIFADDR), _interface_address(name, _SIOCGIFNETMASK)
        if address is not None and mask is not None:
            found[name] = address, ipaddress.IPv4Network(f"{address}/{mask}", strict=False)
    return found


def _interface_address(name: str, request: int) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), request, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def with_network_settings(env: Mapping[str, str]) -> dict[str, str]:
    """Adds Open MPI's settings for several hosts to an environment; existing values take precedence."""
    is_chosen = any(name.startswith("OMPI_MCA_coll_tuned_") for name in env)
    return {**_OPEN_MPI_TCP, **({} if is_chosen else _OPEN_MPI_RING), **env}


def forwarded_names(env: Mapping[str, str], more: Iterable[str] = ()) -> list[str]:
    """The names of the variables to forward to all hosts: those a job may need, and ``more``."""
    return sorted({*filter(FORWARDED.fullmatch, env), *more})
