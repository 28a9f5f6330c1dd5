"""The lab: host names, links, disks, ssh, and complete removal."""

import subprocess
import sys
from pathlib import Path

import laboratory
import pytest
from laboratory import Laboratory, LaboratoryError, missing, remove

LAB = Path(laboratory.__file__).parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.waits,
    pytest.mark.lab,
    pytest.mark.skipif(bool(missing()), reason=f"a lab needs {', '.join(missing())}"),
]

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
    folders = {"/run/netns": "lab*", "/run": "hvdtrain-lab"}
    found = [str(path) for folder, pattern in folders.items() for path in Path(folder).glob(pattern)]
    running = subprocess.run(["pgrep", "-f", str(LAB / "links.py")], capture_output=True, text=True, check=False)
    return found + running.stdout.split()


def output_of(command: list[str], timeout_s: float = 30) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done
    return done.stdout.strip()


def test_links_have_rate_and_delay():
    with Laboratory(2, rate_mbit=20, delay_ms=30) as lab:
        before = lab.bytes_sent("lab2")
        server = subprocess.Popen(lab.command("lab2", [sys.executable, "-c", SERVER]), stdout=subprocess.PIPE)
        assert server.stdout.readline() == b"listens\n"
        host, size, connecting_s, receiving_s = output_of(lab.command("lab1", [sys.executable, "-c", CLIENT])).split()
        assert server.wait(10) == 0
        assert (host, size) == ("lab1", "1000000")
        # One round trip; and 8 Mbit at 20 Mbit/s.
        assert float(connecting_s) >= 0.06
        assert float(receiving_s) >= 0.4
        assert 1_000_000 <= lab.bytes_sent("lab2") - before < 1_200_000
    assert left_over() == []


def test_hosts_are_isolated_except_for_ssh():
    with Laboratory(2) as lab:
        listen = "import socket; socket.create_server(('0.0.0.0', 7001)); print('up', flush=True); input()"
        server = subprocess.Popen(
            lab.command("lab2", [sys.executable, "-c", listen]), stdout=subprocess.PIPE, stdin=subprocess.PIPE
        )
        assert server.stdout.readline() == b"up\n"
        refused = "import socket; print(socket.socket().connect_ex(('127.0.0.1', 7001)) != 0)"
        assert output_of(lab.command("lab1", [sys.executable, "-c", refused])) == "True"
        server.communicate(b"\n", timeout=10)
        # Each has its own disk, which is accessible from this machine.
        output_of(lab.command("lab1", ["ssh", "lab2", "touch /mnt/own; hostname > /mnt/name"]))
        assert (lab.path("lab2", "/mnt/name")).read_text() == "lab2\n"
        assert output_of(lab.command("lab1", ["ls", "/mnt"])) == ""
        # The user's .bashrc is hidden.
        output_of(lab.command("lab1", ["ssh", "lab2", "test ! -s ~/.bashrc"]))
        # A cut link drops packets until it is restored.
        connect = ["ssh", "-o", "ConnectTimeout=1", "lab2", "true"]
        lab.cut("lab2")
        assert subprocess.run(lab.command("lab1", connect), capture_output=True, timeout=10).returncode == 255
        lab.restore("lab2")
        output_of(lab.command("lab1", connect))
        lab.kill("lab2")
        assert subprocess.run(lab.command("lab1", connect), capture_output=True, timeout=10).returncode == 255
        with pytest.raises(LaboratoryError, match="Received: lab3"):
            lab.command("lab3", ["true"])


def test_leftovers_of_a_crash_are_removed():
    lab = Laboratory(2)
    lab.start()
    subprocess.Popen(lab.command("lab2", ["sleep", "100"]))
    assert len(left_over()) == 4
    remove()
    assert left_over() == []
    with pytest.raises(LaboratoryError, match="Start one"):
        Laboratory.running()


def test_command_line_tools():
    assert "lab1, lab2, lab3" in output_of(
        [str(LAB / "up"), "3", "--rate", "100mbit", "--delay", "500us", "--loss", "1%"]
    )
    try:
        spec = Laboratory.running()
        assert spec.names == ["lab1", "lab2", "lab3"]
        assert output_of([str(LAB / "run"), "hostname"]) == "lab1"
        assert output_of([str(LAB / "run"), "--on", "lab3", "pwd"]) == str(Path.cwd())
        output_of([str(LAB / "link"), "lab2", "cut"])
        unknown = subprocess.run([str(LAB / "link"), "lab9", "cut"], capture_output=True, text=True, check=False)
        assert (unknown.returncode, unknown.stderr) == (
            1,
            "launch/lab/link: the host must be one of lab1, lab2, lab3. Received: lab9\n",
        )
    finally:
        output_of([str(LAB / "down")])
    assert left_over() == []
    wrong = subprocess.run([str(LAB / "up"), "2", "--rate", "fast"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "must be a number with one of mbit, kbit. Received: fast" in wrong.stderr
