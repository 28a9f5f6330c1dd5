"""A lab of virtual hosts on this machine, connected by emulated links, for tests that need several hosts.

Each host is a network namespace with its own address, host name, hosts file, ``sshd`` and disk (``/mnt``); ``ssh``,
``mpirun`` and ``horovodrun`` work between hosts without changes. Everything else is shared with this machine.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

PREFIX = "10.77.0."
FOLDER = Path("/run/hvdtrain-lab")
"""Keys, logs and /etc files of the running lab; only one can run at a time."""
START_TIMEOUT_S = 10.0
_LINKS = Path(__file__).with_name("links.py")
_NETNS = Path("/run/netns")
_NAMES = "lab[0-9]*"
_SSHD_CONFIG = """\
ListenAddress {address}
HostKey /etc/ssh/host_key
AuthorizedKeysFile /etc/ssh/authorized_keys
StrictModes no
PermitRootLogin yes
PasswordAuthentication no
PidFile none
MaxStartups 100
"""
_SSH_CONFIG = """\
IdentityFile /etc/ssh/key
IdentitiesOnly yes
GlobalKnownHostsFile /etc/ssh/known_hosts
UserKnownHostsFile /dev/null
StrictHostKeyChecking yes
BatchMode yes
ConnectTimeout 10
"""


# Arguments: host name, FOLDER. Mounts a new /sys, with the host's own devices, but keeps control groups for Slurm.
# Hides the user's .bashrc, which bash reads for every ssh command and which could block.
_HOST = """
hostname "$0"
[ ! -e ~/.bashrc ] || mount --bind /dev/null ~/.bashrc
mount --bind "$1/$0/hosts" /etc/hosts
mount --bind "$1/$0/ssh" /etc/ssh
mount --rbind /sys/fs/cgroup /mnt
mount -t sysfs sysfs /sys
mount --move /mnt /sys/fs/cgroup
mount -t tmpfs tmpfs /mnt
exec /usr/sbin/sshd -D -e
"""


class LaboratoryError(RuntimeError):
    """A lab cannot run on this machine, or none is running."""


def missing() -> list[str]:
    """The prerequisites of a lab that this machine lacks; empty if it has all."""
    needed = {
        "root": os.geteuid() == 0,
        "ip (Debian: iproute2)": shutil.which("ip"),
        "sshd (Debian: openssh-server)": shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin"),
        "ssh and ssh-keygen (Debian: openssh-client)": shutil.which("ssh") and shutil.which("ssh-keygen"),
        "nsenter and unshare (Debian: util-linux)": shutil.which("nsenter") and shutil.which("unshare"),
        "/dev/net/tun": Path("/dev/net/tun").exists(),
    }
    return [name for name, found in needed.items() if not found]


class Laboratory:
    """Hosts ``lab1`` to ``labN``. Removed on exit; leftovers of an earlier lab are removed on start.

    Args:
        hosts: number of hosts.
        rate_mbit, delay_ms: rate and one-way delay of each host's link.
        loss: fraction of packets lost.
        mtu_bytes: size of the largest packet.
    """

    def __init__(
        self, hosts: int, *, rate_mbit: float = 1000.0, delay_ms: float = 0.0, loss: float = 0.0, mtu_bytes: int = 9000
    ):
        self.names = [f"lab{i + 1}" for i in range(hosts)]
        self._spec = {
            "namespaces": self.names,
            "prefix": PREFIX,
            "rate_bits": 1e6 * rate_mbit,
            "delay_s": delay_ms / 1000,
            "loss": loss,
            "mtu_bytes": mtu_bytes,
            "control": str(FOLDER / "links.sock"),
        }

    @classmethod
    def running(cls) -> "Laboratory":
        """The lab that is already running.

        Raises:
            LaboratoryError: none is running.
        """
        num_hosts = len(list(FOLDER.glob("lab*.pid")))
        if not num_hosts:
            raise LaboratoryError("a lab must be running. Received: none. Start one: launch/lab/up 2")
        return cls(num_hosts)

    def __enter__(self) -> "Laboratory":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        remove()

    def start(self) -> None:
        """Creates the hosts and their links.

        Raises:
            LaboratoryError: a prerequisite is missing, or a host or link did not start.
        """
        if lacks := missing():
            raise LaboratoryError(f"this machine lacks prerequisites of a lab. Missing: {', '.join(lacks)}.")
        remove()
        FOLDER.mkdir(mode=0o700)
        try:
            self._write_files()
            for name in self.names:
                _ip("netns", "add", name)
            self._start_links()
            for name in self.names:
                self._start_host(name)
            self._await_hosts()
        except BaseException:
            remove()
            raise

    def _write_files(self) -> None:
        """Writes each host's /etc files, and one key that gives access only to the hosts of this lab."""
        key = FOLDER / "key"
        for path in (key, *(FOLDER / f"{name}.host_key" for name in self.names)):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", path.name, "-f", path], check=True)
        addresses = {name: f"{PREFIX}{i + 1}" for i, name in enumerate(self.names)}
        hosts = "".join(f"{address} {name}\n" for name, address in addresses.items())
        known = "".join(f"{name},{addresses[name]} {_public(FOLDER / f'{name}.host_key')}" for name in self.names)
        for name, address in addresses.items():
            ssh = FOLDER / name / "ssh"
            ssh.mkdir(parents=True)
            (ssh.parent / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
            (ssh / "sshd_config").write_text(_SSHD_CONFIG.format(address=address))
            (ssh / "ssh_config").write_text(_SSH_CONFIG)
            (ssh / "known_hosts").write_text(known)
            (ssh / "authorized_keys").write_text(_public(key))
            shutil.copy(key, ssh / "key")
            shutil.copy(FOLDER / f"{name}.host_key", ssh / "host_key")

    def _start_links(self) -> None:
        with (FOLDER / "links.log").open("w") as log:
            links = subprocess.Popen(
                [sys.executable, str(_LINKS), json.dumps(self._spec)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        assert links.stdout is not None
        with links.stdout:
            if links.stdout.readline().strip() != "ready":
                raise LaboratoryError(f"the links did not start: {(FOLDER / 'links.log').read_text()[-500:]}")

    def _start_host(self, name: str) -> None:
        Path("/run/sshd").mkdir(exist_ok=True)
        with (FOLDER / f"{name}.log").open("w") as log:
            host = subprocess.Popen(
                [
                    "nsenter",
                    f"--net={_NETNS / name}",
                    "unshare",
                    "--mount",
                    "--uts",
                    "sh",
                    "-e",
                    "-c",
                    _HOST,
                    name,
                    FOLDER,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        (FOLDER / f"{name}.pid").write_text(str(host.pid))

    def _await_hosts(self) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        for name in self.names:
            log = FOLDER / f"{name}.log"
            while "Server listening" not in log.read_text():
                if time.monotonic() > deadline_s:
                    raise LaboratoryError(f"host {name} did not start: {log.read_text()[-500:]}")
                time.sleep(0.02)

    def require(self, host: str) -> None:
        """Raises LaboratoryError if there is no such host."""
        if host not in self.names:
            raise LaboratoryError(f"the host must be one of {', '.join(self.names)}. Received: {host}")

    def command(self, host: str, command: list[str]) -> list[str]:
        """The command line that runs a command on a host, with this process's folder, environment and terminal."""
        enter = ["nsenter", "--target", self._process(host), "--net", "--mount", "--uts"]
        return [*enter, "env", "-C", str(Path.cwd()), *command]

    def address(self, host: str) -> str:
        """The address of a host."""
        self.require(host)
        return f"{PREFIX}{self.names.index(host) + 1}"

    def path(self, host: str, path: str) -> Path:
        """The path of a host's file as seen from this machine."""
        return Path(f"/proc/{self._process(host)}/root{path}")

    def _process(self, host: str) -> str:
        self.require(host)
        return (FOLDER / f"{host}.pid").read_text()

    def slots(self, ranks_per_host: int = 1) -> str:
        """All hosts, in the form of a launcher's ``-H``."""
        return ",".join(f"{name}:{ranks_per_host}" for name in self.names)

    def cut(self, host: str) -> None:
        """Drops all packets from and to a host, as if its cable were unplugged."""
        self._send_to_links({"host": host, "is_cut": True})

    def restore(self, host: str) -> None:
        """Undoes :meth:`cut`."""
        self._send_to_links({"host": host, "is_cut": False})

    def kill(self, host: str) -> None:
        """Kills all processes on a host."""
        _kill_processes(host)

    def _send_to_links(self, message: dict[str, object]) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as control:
            control.sendto(json.dumps(message).encode(), str(self._spec["control"]))

    def bytes_sent(self, host: str) -> int:
        """Bytes that a host has sent over its link, including IP and TCP headers."""
        shown = subprocess.run(["ip", "-n", host, "-s", "-j", "link", "show", "eth0"], capture_output=True, check=True)
        return int(json.loads(shown.stdout)[0]["stats64"]["tx"]["bytes"])


def remove() -> None:
    """Removes the lab, or what a crashed one has left."""
    for pid in _links_running():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for path in _NETNS.glob(_NAMES):
        _kill_processes(path.name)
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("netns", "delete", path.name)
    shutil.rmtree(FOLDER, ignore_errors=True)


def _links_running() -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(_LINKS).encode() in path.read_bytes().split(b"\0")[:2]:
                found.append(int(path.parent.name))
    return found


def _kill_processes(host: str) -> None:
    pids = subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True, check=False).stdout.split()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _public(key: Path) -> str:
    return key.with_name(f"{key.name}.pub").read_text()
