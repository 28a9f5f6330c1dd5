"""Where the ranks of the jobs run: on this machine, or each on a host of the lab."""

import json
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from laboratory import Laboratory

HERE = Path(__file__).resolve().parent
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
_LAUNCH = HERE.parent.parent / "launch"
_VARIABLES = ("NETWORK", "NUM_TURNS", "TURNS", "THREADS", "TF_CPP_MIN_LOG_LEVEL")
"""Environment variables that every rank reads."""

Process = tuple[list[str], dict[str, str]]
"""A command line and its additional environment variables."""


class Place(Protocol):
    """Makes the commands of jobs."""

    def under_launchers(self, script: str, ranks: int) -> list[Process]:
        """The process of each launcher that is worth comparing here."""

    def without_launcher(self, python: str, script: str, ranks: int) -> list[Process]:
        """A process per rank, with the variables that TensorFlow's, PyTorch's and JAX's own strategies need."""


class ThisMachine:
    """All ranks on this machine."""

    def under_launchers(self, script: str, ranks: int) -> list[Process]:
        return [([*MPIRUN, "-np", str(ranks), sys.executable, str(HERE / script)], _threads(ranks))]

    def without_launcher(self, python: str, script: str, ranks: int) -> list[Process]:
        places = _variables(["127.0.0.1"] * ranks, _free_ports(ranks))
        return [([python, str(HERE / script)], {**_threads(ranks), **place}) for place in places]


class Hosts:
    """A rank on each host of the lab. The cores of this machine are divided between them."""

    def __init__(self, lab: "Laboratory"):
        self._lab = lab

    def under_launchers(self, script: str, ranks: int) -> list[Process]:
        # Between hosts, ranks over MPI poll while they wait, and those over Gloo sleep.
        launchers = [[str(_LAUNCH / "mpirun.sh")], [str(_LAUNCH / "horovodrun.sh"), "--gloo"]]
        forwarded = [part for name in _VARIABLES for part in ("--env", name)]
        program = ["-H", self._lab.slots(), *forwarded, sys.executable, str(HERE / script)]
        # Gloo would end a job that is stopped for 30 s while others have their turn.
        env = {**_threads(ranks), "HOROVOD_GLOO_TIMEOUT_SECONDS": "3600"}
        return [(self._lab.command(self._lab.names[0], [*launcher, *program]), env) for launcher in launchers]

    def without_launcher(self, python: str, script: str, ranks: int) -> list[Process]:
        hosts = self._lab.names
        places = _variables([self._lab.address(host) for host in hosts], _free_ports(ranks))
        return [
            (
                self._lab.command(host, [python, str(HERE / script)]),
                {**_threads(ranks), **place, "GLOO_SOCKET_IFNAME": "eth0"},
            )
            for host, place in zip(hosts, places, strict=True)
        ]


def _threads(ranks: int) -> dict[str, str]:
    """How many threads a rank computes with: its share of this machine's cores."""
    return {"THREADS": str(max(1, len(os.sched_getaffinity(0)) // ranks))}


def _variables(addresses: list[str], ports: list[int]) -> list[dict[str, str]]:
    cluster = {"worker": [f"{address}:{port}" for address, port in zip(addresses, ports, strict=True)]}
    shared = {"MASTER_ADDR": addresses[0], "MASTER_PORT": str(ports[0]), "WORLD_SIZE": str(len(addresses))}
    return [
        {
            **shared,
            "RANK": str(rank),
            "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}}),
        }
        for rank in range(len(addresses))
    ]


def _free_ports(count: int) -> list[int]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports
