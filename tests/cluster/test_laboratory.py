"""The hosts of the laboratory: names, links, and that nothing of them is left."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "launch" / "lab"))
from hosts import Laboratory, remove  # noqa: E402

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None or not Path("/dev/net/tun").exists(),
    reason="a laboratory needs root, Debian's iproute2 and /dev/net/tun",
)

SERVER = """
import socket
with socket.create_server(("lab2", 7000)) as listener:
    print("listens", flush=True)
    connection, _ = listener.accept()
    connection.sendall(bytes(1_000_000))
    connection.close()
"""
CLIENT = """
import socket, time
began = time.monotonic()
connection = socket.create_connection(("lab2", 7000))
connected = time.monotonic()
size = 0
while part := connection.recv(1 << 16):
    size += len(part)
print(socket.gethostname(), size, connected - began, time.monotonic() - connected)
"""


def left_over() -> list[str]:
    return [path.name for folder in ("/run/netns", "/etc/netns") for path in Path(folder).glob("lab[0-9]*")]


def test_links_have_a_rate_and_a_delay():
    with Laboratory(2, rate_mbit=20, delay_ms=30) as lab:
        before = lab.bytes_sent("lab2")
        server = subprocess.Popen(lab.command("lab2", [sys.executable, "-c", SERVER]), stdout=subprocess.PIPE)
        assert server.stdout.readline() == b"listens\n"
        done = subprocess.run(
            lab.command("lab1", [sys.executable, "-c", CLIENT]), capture_output=True, text=True, timeout=30, check=True
        )
        assert server.wait(10) == 0
        host, size, connecting_s, receiving_s = done.stdout.split()
        assert (host, size) == ("lab1", "1000000")
        # There and back; and 8 million bits at 20 million a second.
        assert float(connecting_s) >= 0.06
        assert float(receiving_s) >= 0.4
        assert 1_000_000 <= lab.bytes_sent("lab2") - before < 1_200_000
    assert left_over() == []


def test_what_a_crash_has_left_is_removed():
    lab = Laboratory(2)
    lab.__enter__()
    lab._links.kill()
    assert left_over()
    remove()
    assert left_over() == []


def test_one_host_does_not_see_anothers_ports():
    with Laboratory(2) as lab:
        listen = "import socket; socket.create_server(('0.0.0.0', 7001)); print('up', flush=True); input()"
        server = subprocess.Popen(
            lab.command("lab2", [sys.executable, "-c", listen]), stdout=subprocess.PIPE, stdin=subprocess.PIPE
        )
        assert server.stdout.readline() == b"up\n"
        refused = "import socket; print(socket.socket().connect_ex(('127.0.0.1', 7001)) != 0)"
        done = subprocess.run(lab.command("lab1", [sys.executable, "-c", refused]), capture_output=True, text=True)
        assert done.stdout.strip() == "True", done
        server.communicate(b"\n", timeout=10)
