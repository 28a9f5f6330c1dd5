"""The ports of jobs on two hosts, tried from a third one that is not part of the job."""

import base64
import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest
from laboratory import Laboratory, missing
from launcher import LONG, ROOT, Job

pytestmark = [
    pytest.mark.slow,
    pytest.mark.waits,
    pytest.mark.lab,
    pytest.mark.skipif(bool(missing()), reason=f"a lab needs {', '.join(missing())}"),
]

HOSTS, STRANGER = ("lab1", "lab2"), "lab3"
SSH_PORT = 22
MPIRUN, HOROVODRUN = str(ROOT / "launch" / "mpirun.sh"), str(ROOT / "launch" / "horovodrun.sh")
SLOTS = "lab1:1,lab2:1"
LAUNCHERS = {
    "mpirun": [MPIRUN, "-H", SLOTS],
    "horovodrun": [HOROVODRUN, "-H", SLOTS],
    "gloo": [HOROVODRUN, "--gloo", "-H", SLOTS],
    "elastic": [sys.executable, "-m", "hvdtrain", "elastic", "2:2", "--hosts", SLOTS],
}

# Arguments: the endpoints and what to send, in JSON. Prints the first bytes of each answer.
TRY = """
import base64, json, socket, sys
endpoints, messages = json.loads(sys.argv[1])
silent, answers = [], {}
for address, port in endpoints:
    found = answers[f"{address}:{port}"] = []
    try:
        for _ in range(20):
            silent.append(socket.create_connection((address, port), timeout=3))
        for message in messages:
            with socket.create_connection((address, port), timeout=3) as connection:
                connection.settimeout(1)
                try:
                    connection.sendall(base64.b64decode(message))
                    found.append(base64.b64encode(connection.recv(4096)).decode())
                except OSError as error:
                    found.append("")
    except OSError:
        pass
print(json.dumps(answers))
"""


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path):
        self._path = path

    def __reduce__(self):
        return os.system, (f"touch {self._path}",)


def messages(mark: Path) -> list[bytes]:
    """What a stranger might send: code, requests for files and addresses, new addresses, and noise."""
    code = pickle.dumps(Touch(mark))
    encoded = base64.b64encode(code)
    found = [code, len(code).to_bytes(4, "big") + code, b'{"kind": "end", "code": 9}\n', os.urandom(1 << 16)]
    for method, path, body in (
        ("PUT", "/worker_addresses/localhost:0", encoded),
        ("GET", "/global/0", b""),
        ("PUT", "/global/0", b"nowhere"),
        ("DELETE", "/global/0", b""),
        ("GET", "/etc/passwd", b""),
        ("HEAD", "/", b""),
        ("POST", "/", encoded),
    ):
        found.append(f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    return found


def listening(lab: Laboratory, host: str) -> set[tuple[str, int]]:
    """The addresses and TCP ports on which a host listens, but for its ssh server."""
    shown = subprocess.run(lab.command(host, ["ss", "-Hltn"]), capture_output=True, text=True, check=True)
    found = [line.split()[3].rpartition(":") for line in shown.stdout.splitlines()]
    return {(address.strip("[]"), int(port)) for address, _, port in found if int(port) != SSH_PORT}


@pytest.mark.parametrize("launcher", ["elastic", "mpirun", LONG("horovodrun"), LONG("gloo")])
def test_a_stranger_changes_nothing(launcher, tmp_path):
    """While a job trains, its ports are sent code, requests and noise, and silent connections stay open."""
    mark = tmp_path / "executed"
    with Laboratory(3) as lab:
        train = [sys.executable, "-m", "hvdtrain", "--steps", "1000000", "--log-every", "20"]
        line = [*LAUNCHERS[launcher], *train, "--run-dir", str(tmp_path / "run")]
        job = Job(lab.command("lab1", line), ranks=2, launcher="")
        try:
            job.wait_for("examples/s", 120)
            ports = {host: listening(lab, host) for host in HOSTS}
            assert ports["lab1"], "the job listens on no port"
            endpoints = [(lab.address(host), port) for host in HOSTS for _, port in sorted(ports[host])]
            sent = [base64.b64encode(each).decode() for each in messages(mark)]
            line = lab.command(STRANGER, [sys.executable, "-c", TRY, json.dumps([endpoints, sent])])
            tried = subprocess.run(line, capture_output=True, text=True, check=True, timeout=300)
            answers = {each: list(map(base64.b64decode, found)) for each, found in json.loads(tried.stdout).items()}
            logged = job.output.count("examples/s")
            until_s = time.monotonic() + 60
            while job.output.count("examples/s") < logged + 2:
                assert job.is_running, job.output
                assert time.monotonic() < until_s, job.output
                time.sleep(0.1)
        finally:
            job.kill()
    assert not mark.exists()
    assert any(answers.values()), "no port could be reached, or none was sent anything"
    granted = [each for found in answers.values() for each in found if each.startswith((b"HTTP/1.0 2", b"HTTP/1.1 2"))]
    assert not granted, granted
