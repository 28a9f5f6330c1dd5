"""The rendezvous of an elastic job, where ranks exchange their addresses."""

import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import psutil
import pytest

from hvdtrain.distributed.rendezvous import Rendezvous
from hvdtrain.system import processes


def test_a_rendezvous_answers_when_there_is_an_answer(monkeypatch):
    monkeypatch.setattr("hvdtrain.distributed.rendezvous._WAIT_S", 60.0)
    rendezvous = Rendezvous("127.0.0.1")
    rendezvous.start()
    scope = f"http://127.0.0.1:{rendezvous.port}/global"
    answers = []
    asking = threading.Thread(target=lambda: answers.append(urllib.request.urlopen(f"{scope}/1").read()))
    asking.start()
    time.sleep(0.1)
    urllib.request.urlopen(urllib.request.Request(f"{scope}/1", b"an address", method="PUT")).close()
    asking.join(10)
    assert answers == [b"an address"]
    monkeypatch.setattr("hvdtrain.distributed.rendezvous._WAIT_S", 0.1)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{scope}/2")
    rendezvous.fail()
    assert urllib.request.urlopen(f"{scope}/2").read() == b""
    rendezvous.close()


def test_all_ranks_may_connect_at_once_to_a_rendezvous():
    rendezvous = Rendezvous("127.0.0.1")  # It accepts none yet: all have to wait in the queue.
    waiting = [socket.create_connection(("127.0.0.1", rendezvous.port), timeout=0.5) for _ in range(64)]
    assert len(waiting) == 64
    for each in waiting:
        each.close()
    rendezvous.close()


def test_a_rendezvous_leaves_no_port():
    rendezvous = Rendezvous("127.0.0.1")
    rendezvous.start()
    port = rendezvous.port
    rendezvous.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def test_a_rendezvous_tells_nothing_about_files(tmp_path, monkeypatch):
    (tmp_path / "secret.txt").write_text("1234")
    monkeypatch.chdir(tmp_path)
    rendezvous = Rendezvous("127.0.0.1")
    rendezvous.start()
    for path in ("/secret.txt", "/"):
        request = urllib.request.Request(f"http://127.0.0.1:{rendezvous.port}{path}", method="HEAD")
        with pytest.raises(urllib.error.HTTPError, match="501"):
            urllib.request.urlopen(request)
    rendezvous.close()


def test_the_rendezvous_of_horovodrun_listens_on_loopback_on_one_host():
    command = ["horovodrun", "--gloo", "-np", "1", sys.executable, "-c", "import time; time.sleep(60)"]
    job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 20
        found: list = []
        while not found and time.monotonic() < until:
            time.sleep(0.1)
            connections = psutil.Process(job.pid).net_connections(kind="tcp")
            found = [each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN]
        assert found
        assert set(found) == {"127.0.0.1"}
    finally:
        processes.end_processes([psutil.Process(job.pid), *psutil.Process(job.pid).children(recursive=True)])
