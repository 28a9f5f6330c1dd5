"""Hosts in a laboratory: network namespaces of this machine, each with its address, host name and hosts file."""

import contextlib
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import TracebackType

PREFIX = "10.77.0."
_LINKS = Path(__file__).with_name("links.py")
_RSH = Path(__file__).with_name("rsh")


class Laboratory:
    """Hosts ``lab1`` to ``labN``, joined by links; all of it is gone at the end, and before a new start.

    Args:
        hosts: how many.
        rate_mbit, delay_ms: of each host's link, the delay one way.
        loss: share of packets that get lost.

    Raises:
        RuntimeError: this needs root, Debian's iproute2 and /dev/net/tun.
    """

    def __init__(self, hosts: int, *, rate_mbit: float = 1000.0, delay_ms: float = 0.0, loss: float = 0.0):
        self.names = [f"lab{i + 1}" for i in range(hosts)]
        self._spec = {
            "namespaces": self.names,
            "prefix": PREFIX,
            "rate_bits": 1e6 * rate_mbit,
            "delay_s": delay_ms / 1000,
            "loss": loss,
        }
        self._links: subprocess.Popen[str] | None = None

    def __enter__(self) -> "Laboratory":
        if shutil.which("ip") is None or not Path("/dev/net/tun").exists():
            raise RuntimeError("a laboratory needs root, Debian's iproute2 and /dev/net/tun")
        remove()
        table = "".join(f"{PREFIX}{i + 1} {name}\n" for i, name in enumerate(self.names))
        for name in self.names:
            subprocess.run(["ip", "netns", "add", name], check=True)
            folder = Path("/etc/netns") / name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{table}")
        self._links = subprocess.Popen(
            [sys.executable, str(_LINKS), json.dumps(self._spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._links.stdout is not None
        if self._links.stdout.readline().strip() != "ready":
            self.__exit__(None, None, None)
            raise RuntimeError("the links of the laboratory did not come up; this needs root")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._links is not None:
            assert self._links.stdin is not None
            self._links.stdin.close()
            self._links.wait(10)
        remove()

    def command(self, host: str, command: list[str]) -> list[str]:
        """The same command on a host."""
        return [str(_RSH), host, shlex.join(command)]

    def mpirun(self, command: list[str], ranks_per_host: int = 1) -> list[str]:
        """The same under ``mpirun`` on the first host, with ranks on all of them."""
        hosts = ",".join(f"{name}:{ranks_per_host}" for name in self.names)
        network = f"{PREFIX}0/24"
        options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-H", hosts]
        options += ["--mca", "plm_rsh_agent", str(_RSH), "--mca", "pml", "ob1", "--mca", "btl", "tcp,self,vader"]
        options += ["--mca", "btl_tcp_if_include", network, "--mca", "oob_tcp_if_include", network]
        return self.command(self.names[0], ["mpirun", *options, *command])

    def bytes_sent(self, host: str) -> int:
        """What a host has sent over its link so far."""
        shown = subprocess.run(["ip", "-n", host, "-s", "-j", "link", "show", "eth0"], capture_output=True, check=True)
        return int(json.loads(shown.stdout)[0]["stats64"]["tx"]["bytes"])


def remove() -> None:
    """Whatever a laboratory has left, also after a crash."""
    for path in Path("/run/netns").glob("lab[0-9]*"):
        with contextlib.suppress(subprocess.CalledProcessError):
            pids = subprocess.run(["ip", "netns", "pids", path.name], capture_output=True, text=True, check=True)
            if numbers := pids.stdout.split():
                subprocess.run(["kill", "-9", *numbers], check=False)
            subprocess.run(["ip", "netns", "delete", path.name], check=True)
    for folder in Path("/etc/netns").glob("lab[0-9]*"):
        shutil.rmtree(folder)
