"""Hosts of a job: parsing host lists, distributing ranks, and checking that hosts are ready."""

import re
import socket
import subprocess
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from hvdtrain.system.network import host_addresses


class Host(NamedTuple):
    """A host and its slots: the number of ranks it can run."""

    name: str
    slots: int

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}"


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
    own |= {"127.0.0.1", *host_addresses()}
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
