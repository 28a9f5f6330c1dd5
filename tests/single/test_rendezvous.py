"""The rendezvous of an elastic job, where ranks exchange their addresses."""

import socket
import threading
import time
import urllib.error
import urllib.request

import pytest

from hvdtrain.distributed.rendezvous import Rendezvous


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
