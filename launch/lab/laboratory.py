"""A laboratory: hosts on this machine, joined by links, for whatever needs more than one host.

Each host is a network namespace with an address, a host name, a hosts file, an ``sshd`` and a disk of its own
(``/mnt``); ``ssh``, ``mpirun`` and ``horovodrun`` work between them as they are. All else is this machine's.
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
PLACE = Path("/run/hvdtrain-lab")
"""Keys, logs and what hosts find in /etc, of the laboratory that is up: there is one at a time."""
STARTS_WITHIN_S = 10.0
_LINKS = Path(__file__).with_name("links.py")
_NETNS = Path("/run/netns")
_OURS = "lab[0-9]*"
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


# With its name and the place. Below /sys are the host's own devices then; the control groups stay, for Slurm.
# Without the user's .bashrc, which bash reads for each command of ssh, and in which each may wait for all others.
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
    """The machine cannot have a laboratory, or there is none."""


def missing() -> list[str]:
    """What this machine lacks for a laboratory; empty where it has all."""
    needed = {
        "root": os.geteuid() == 0,
        "ip (Debian: iproute2)": shutil.which("ip"),
        "sshd (Debian: openssh-server)": shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin"),
        "ssh and ssh-keygen (Debian: openssh-client)": shutil.which("ssh") and shutil.which("ssh-keygen"),
        "nsenter and unshare (Debian: util-linux)": shutil.which("nsenter") and shutil.which("unshare"),
        "/dev/net/tun": Path("/dev/net/tun").exists(),
    }
    return [name for name, is_there in needed.items() if not is_there]


class Laboratory:
    """Hosts ``lab1`` to ``labN``; all of it is gone at the end, and whatever is left of another one before.

    Args:
        hosts: how many.
        rate_mbit, delay_ms: of each host's link, the delay one way.
        loss: share of packets that get lost.
        mtu_bytes: the size of the largest packet.
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
            "control": str(PLACE / "links.sock"),
        }

    @classmethod
    def that_is_up(cls) -> "Laboratory":
        """The one that was started before.

        Raises:
            LaboratoryError: there is none.
        """
        num_hosts = len(list(PLACE.glob("lab*.pid")))
        if not num_hosts:
            raise LaboratoryError("there must be a laboratory. Received: none. Start one: launch/lab/up 2")
        return cls(num_hosts)

    def __enter__(self) -> "Laboratory":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        remove()

    def start(self) -> None:
        """Makes the hosts and their links.

        Raises:
            LaboratoryError: the machine lacks something, or a part did not come up.
        """
        if lacks := missing():
            raise LaboratoryError(f"a laboratory needs more than there is. Missing: {', '.join(lacks)}.")
        remove()
        PLACE.mkdir(mode=0o700)
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
        """What each host finds in /etc, and one key that opens all hosts of this laboratory and nothing else."""
        key = PLACE / "key"
        for path in (key, *(PLACE / f"{name}.host_key" for name in self.names)):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", path.name, "-f", path], check=True)
        addresses = {name: f"{PREFIX}{i + 1}" for i, name in enumerate(self.names)}
        hosts = "".join(f"{address} {name}\n" for name, address in addresses.items())
        known = "".join(f"{name},{addresses[name]} {_public(PLACE / f'{name}.host_key')}" for name in self.names)
        for name, address in addresses.items():
            ssh = PLACE / name / "ssh"
            ssh.mkdir(parents=True)
            (ssh.parent / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
            (ssh / "sshd_config").write_text(_SSHD_CONFIG.format(address=address))
            (ssh / "ssh_config").write_text(_SSH_CONFIG)
            (ssh / "known_hosts").write_text(known)
            (ssh / "authorized_keys").write_text(_public(key))
            shutil.copy(key, ssh / "key")
            shutil.copy(PLACE / f"{name}.host_key", ssh / "host_key")

    def _start_links(self) -> None:
        with (PLACE / "links.log").open("w") as log:
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
                raise LaboratoryError(f"the links did not come up: {(PLACE / 'links.log').read_text()[-500:]}")

    def _start_host(self, name: str) -> None:
        Path("/run/sshd").mkdir(exist_ok=True)
        with (PLACE / f"{name}.log").open("w") as log:
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
                    PLACE,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        (PLACE / f"{name}.pid").write_text(str(host.pid))

    def _await_hosts(self) -> None:
        deadline_s = time.monotonic() + STARTS_WITHIN_S
        for name in self.names:
            log = PLACE / f"{name}.log"
            while "Server listening" not in log.read_text():
                if time.monotonic() > deadline_s:
                    raise LaboratoryError(f"host {name} did not come up: {log.read_text()[-500:]}")
                time.sleep(0.02)

    def require(self, host: str) -> None:
        """Raises LaboratoryError where there is no such host."""
        if host not in self.names:
            raise LaboratoryError(f"the host must be one of {', '.join(self.names)}. Received: {host}")

    def command(self, host: str, command: list[str]) -> list[str]:
        """The same command on a host, in the same folder, with the same environment, and a terminal if there is one."""
        enter = ["nsenter", "--target", self._process(host), "--net", "--mount", "--uts"]
        return [*enter, "env", "-C", str(Path.cwd()), *command]

    def path(self, host: str, path: str) -> Path:
        """A file of a host, as it is seen from outside."""
        return Path(f"/proc/{self._process(host)}/root{path}")

    def _process(self, host: str) -> str:
        self.require(host)
        return (PLACE / f"{host}.pid").read_text()

    def slots(self, ranks_per_host: int = 1) -> str:
        """All hosts, for ``-H`` of a launcher."""
        return ",".join(f"{name}:{ranks_per_host}" for name in self.names)

    def cut(self, host: str) -> None:
        """Loses every packet from and to a host, as when a cable is pulled: nobody is told."""
        self._tell_links({"host": host, "is_cut": True})

    def mend(self, host: str) -> None:
        """Makes good a cut."""
        self._tell_links({"host": host, "is_cut": False})

    def kill(self, host: str) -> None:
        """Ends every process on a host, at once."""
        _kill_processes(host)

    def _tell_links(self, message: dict[str, object]) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as control:
            control.sendto(json.dumps(message).encode(), str(self._spec["control"]))

    def bytes_sent(self, host: str) -> int:
        """What a host has sent over its link so far, with the headers of IP and TCP."""
        shown = subprocess.run(["ip", "-n", host, "-s", "-j", "link", "show", "eth0"], capture_output=True, check=True)
        return int(json.loads(shown.stdout)[0]["stats64"]["tx"]["bytes"])


def remove() -> None:
    """Whatever a laboratory has left, also after a crash."""
    for pid in _links_running():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for path in _NETNS.glob(_OURS):
        _kill_processes(path.name)
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("netns", "delete", path.name)
    shutil.rmtree(PLACE, ignore_errors=True)


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
