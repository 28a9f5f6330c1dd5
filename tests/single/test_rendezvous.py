"""The rendezvous of an elastic job, where ranks exchange their addresses."""

import http.client
import itertools
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from types import MappingProxyType

import psutil
import pytest

from hvdtrain.distributed.key_value_server import authorization
from hvdtrain.distributed.local_rendezvous import local_rendezvous
from hvdtrain.distributed.rendezvous import Rendezvous
from hvdtrain.system import processes

SIZE, ADDRESS_BYTES = 5, 8


def place_of(rank: int) -> dict[str, int]:
    """All ranks are on one host."""
    own = {f"{which}{name}": value for which in ("", "local_") for name, value in (("rank", rank), ("size", SIZE))}
    return {**own, "cross_rank": 0, "cross_size": 1}


def request(
    address: tuple[str, int],
    method: str,
    path: str,
    value: bytes | None = None,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(*address, timeout=20)
    connection.request(method, f"/{path}", value, headers)
    response = connection.getresponse()
    connection.close()
    return response.status, response.read()


def address(of: int, to: int, scope: str = "global") -> bytes:
    return f"{scope[0]}{of:03}{to:03}".encode().ljust(ADDRESS_BYTES)


def connect(rank: int, rendezvous: tuple[str, int], scope: str = "global") -> tuple[list[bytes], list[bytes]]:
    """Asks as Horovod does; returns the names and the addresses that a rank finds."""
    with local_rendezvous(place_of(rank), rendezvous) as local:
        request(local, "PUT", f"{scope}/rank_{rank}", f"host of {rank}".encode())
        names = [request(local, "GET", f"{scope}/rank_{other}")[1] for other in range(rank)]
        others = [other for other in range(SIZE) if other != rank]
        request(local, "PUT", f"{scope}/{rank}", b"".join(address(rank, other, scope) for other in others))
        addresses = []
        for other in others:
            while (found := request(local, "GET", f"{scope}/{other}"))[0] == 404:
                pass
            assert found == request(local, "GET", f"{scope}/{other}")
            place = rank - 1 if rank > other else rank
            addresses.append(found[1][place * ADDRESS_BYTES : (place + 1) * ADDRESS_BYTES])
            assert len(found[1]) == ADDRESS_BYTES * (SIZE - 1)
        assert request(local, "DELETE", f"{scope}/{rank}")[0] == 200
    return names, addresses


@pytest.fixture
def rendezvous():
    found = Rendezvous("127.0.0.1")
    found.start()
    yield found
    found.close()


def test_ranks_find_each_others_names_and_addresses(monkeypatch):
    """A rank that has connected to all others ends before some of them ask."""
    asked = []
    get = Rendezvous.get
    monkeypatch.setattr(Rendezvous, "get", lambda self, *key: asked.append(key) or get(self, *key))
    counted = Rendezvous("127.0.0.1")
    counted.start()
    found = {}

    def run(rank):
        time.sleep(0.1 * rank)
        found[rank] = [connect(rank, ("127.0.0.1", counted.port), scope) for scope in ("global", "local_here")]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(SIZE)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(30)
    counted.close()
    for rank in range(SIZE):
        for scope, (names, addresses) in zip(("global", "local_here"), found[rank], strict=True):
            assert names == [f"host of {other}".encode() for other in range(rank)]
            assert addresses == [address(other, rank, scope) for other in range(SIZE) if other != rank]
    # Names, but for rank 0, and addresses.
    assert len(asked) == 2 * (2 * SIZE - 1)


def test_a_rank_asks_again_while_others_are_missing(rendezvous, monkeypatch):
    monkeypatch.setattr("hvdtrain.distributed.rendezvous._WAIT_S", 0.1)
    with local_rendezvous(place_of(1), ("127.0.0.1", rendezvous.port)) as local:
        request(local, "PUT", "global/1", b"12345678" * (SIZE - 1))
        assert request(local, "GET", "global/0") == (404, b"")
        for rank in (0, 2, 3, 4):
            request(("127.0.0.1", rendezvous.port), "PUT", f"global/{rank}", b"abcdefgh" * (SIZE - 1))
        status, answer = request(local, "GET", "global/0")
        assert (status, answer[:8]) == (200, b"abcdefgh")


@pytest.mark.parametrize("end", [Rendezvous.fail, Rendezvous.close])
def test_ranks_that_wait_for_a_lost_one_are_released(end):
    rendezvous = Rendezvous("127.0.0.1")
    rendezvous.start()
    with local_rendezvous(place_of(1), ("127.0.0.1", rendezvous.port)) as local:
        answers = []
        asking = threading.Thread(target=lambda: answers.append(request(local, "GET", "global/0")))
        asking.start()
        time.sleep(0.1)
        end(rendezvous)
        asking.join(3)
        assert answers == [(200, b"")]
        assert request(local, "GET", "global/2") == (200, b"")
    rendezvous.close()


def test_a_rank_without_a_rendezvous_does_not_wait():
    closed = Rendezvous("127.0.0.1")
    closed.close()
    with local_rendezvous(place_of(1), ("127.0.0.1", closed.port)) as local:
        assert request(local, "PUT", "global/1", b"")[0] == 200
        assert request(local, "GET", "global/0") == (200, b"")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(local, timeout=5)


@pytest.mark.parametrize(
    "key", ["3", "rank_3", "names", "addresses-5", "addresses-x-5", "addresses--5", "names-1234567890"]
)
def test_a_rendezvous_does_not_wait_for_what_no_rank_asks(rendezvous, key):
    assert request(("127.0.0.1", rendezvous.port), "GET", f"global/{key}") == (404, b"")


def test_what_no_rank_puts_completes_nothing(rendezvous, monkeypatch):
    monkeypatch.setattr("hvdtrain.distributed.rendezvous._WAIT_S", 0.1)
    address = ("127.0.0.1", rendezvous.port)
    for key in ("0", "2", "other"):
        request(address, "PUT", f"global/{key}", b"abcdefgh")
    assert request(address, "GET", "global/addresses-0-2") == (404, b"")
    request(address, "PUT", "global/1", b"12345678")
    assert request(address, "GET", "global/addresses-0-2") == (200, bytes(8) + b"12345678")


def test_a_value_that_the_rendezvous_does_not_take_ends_the_start(monkeypatch):
    def put(self, scope, key, value):
        raise ConnectionResetError

    monkeypatch.setattr(Rendezvous, "put", put)
    busy = Rendezvous("127.0.0.1")
    busy.start()
    with local_rendezvous(place_of(1), ("127.0.0.1", busy.port)) as local:
        assert request(local, "PUT", "global/1", b"")[0] == 200
        assert request(local, "GET", "global/0") == (200, b"")
    busy.close()


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


def test_a_rendezvous_refuses_whoever_has_no_token():
    rendezvous = Rendezvous("127.0.0.1", "secret")
    rendezvous.start()
    address = ("127.0.0.1", rendezvous.port)
    with local_rendezvous(place_of(1), address, "secret") as local:
        for rank in range(SIZE):
            rendezvous.put("global", str(rank), b"abcdefgh" * (SIZE - 1))
        ours = authorization("secret")
        assert request(local, "PUT", "global/1", b"12345678" * (SIZE - 1), ours)[0] == 200
        for server, method in itertools.product((address, local), ("GET", "PUT", "DELETE")):
            for headers in ({}, authorization(""), authorization("secrets"), {"Authorization": "Bearer \xe9"}):
                value = b"nowhere!" if method == "PUT" else None
                assert request(server, method, "global/0", value, headers) == (403, b"")
        assert request(local, "GET", "global/0", None, ours)[1][:8] == b"abcdefgh"
    rendezvous.close()


def test_a_silent_stranger_is_disconnected():
    rendezvous = Rendezvous("127.0.0.1", "secret")
    rendezvous.start()
    with socket.create_connection(("127.0.0.1", rendezvous.port), timeout=20) as stranger:
        assert stranger.recv(1) == b""
    rendezvous.close()


def test_the_rendezvous_of_horovodrun_listens_on_loopback_on_one_host_and_refuses_strangers():
    command = ["horovodrun", "--gloo", "-np", "1", sys.executable, "-c", "import time; time.sleep(60)"]
    job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 20
        found: list = []
        while not found and time.monotonic() < until:
            time.sleep(0.1)
            connections = psutil.Process(job.pid).net_connections(kind="tcp")
            found = [each.laddr for each in connections if each.status == psutil.CONN_LISTEN]
        assert {each.ip for each in found} == {"127.0.0.1"}
        for method in ("GET", "PUT", "DELETE"):
            assert request(found[0], method, "global/0", b"nowhere!" if method == "PUT" else None) == (403, b"")
    finally:
        processes.end_processes([psutil.Process(job.pid), *psutil.Process(job.pid).children(recursive=True)])
