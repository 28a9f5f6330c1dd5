"""TCP connections between the monitor threads of a job's ranks."""

import gc
import os
import re
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from made_up_jobs import ThreadCollectives, on_threads, wait_until

from hvdtrain.errors import HvdtrainError, JobError
from hvdtrain.fault_tolerance import channel
from hvdtrain.fault_tolerance.channel import Connection
from hvdtrain.fault_tolerance.job_watch import JobWatch
from hvdtrain.system import network


def test_closes_its_listener_and_leaves_no_resources():
    gc.collect()  # Otherwise what earlier tests have left may be closed meanwhile.
    descriptors = len(os.listdir("/proc/self/fd"))

    def run(collectives: ThreadCollectives) -> None:
        allgather, endpoints = collectives.allgather, []
        collectives.allgather = lambda value: endpoints.append(allgather(value)) or endpoints[-1]
        with JobWatch(collectives):
            collectives.barrier()
            endpoint = endpoints[1][0]
            assert endpoint.addresses == ["127.0.0.1"]
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((endpoint.addresses[0], endpoint.port))
            collectives.barrier()
            began = time.monotonic()
        assert time.monotonic() - began < 0.5

    assert on_threads(3, run) == [None] * 3
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert not [thread for thread in threading.enumerate() if thread.name == "hvdtrain-monitor"]


def test_hosts_connect_by_address(monkeypatch):
    """Two simulated hosts; the first address of the first one does not answer."""
    addresses = network.host_addresses()
    if not addresses:
        pytest.skip("this host has no address but its own loopback")
    assert not [address for address in addresses if address.startswith("127.")]
    monkeypatch.setattr(network, "host_name", lambda: threading.current_thread().name)
    monkeypatch.setattr(network, "host_addresses", lambda: ["255.255.255.255", *addresses])

    def run(collectives: ThreadCollectives) -> bool:
        threading.current_thread().name = "host " + "aab"[collectives.rank]
        with JobWatch(collectives) as watch:
            if collectives.rank == 2:
                watch.request_stop("a test")
            wait_until(lambda: watch.stop_requested)
            return watch.check()

    assert on_threads(3, run) == [True] * 3


def tampered(change: Any) -> Any:
    """Collectives whose rank 1 receives a changed endpoint from rank 0."""

    class Tampered(ThreadCollectives):
        def allgather(self, value: Any) -> list[Any]:
            values = super().allgather(value)
            return [change(values[0])] if self.rank == 1 and hasattr(values[0], "token") else values

    return Tampered


@contextmanager
def silent_service() -> Iterator[int]:
    """Accepts connections and sends nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_a_wrong_token_is_refused(monkeypatch):
    monkeypatch.setattr(channel, "_CONNECT_S", 0.2)

    def run(collectives: ThreadCollectives) -> None:
        JobWatch(collectives).start()

    results = on_threads(2, run, tampered(lambda endpoint: endpoint._replace(token="0" * 32)))
    assert all(isinstance(result, JobError) for result in results), results
    assert re.search(
        r"Rank 1 \(host .*\) tried: 127\.0\.0\.1 port \d+ \(answered by something other than rank 0", str(results[0])
    )


def test_the_error_names_the_addresses_tried(monkeypatch):
    monkeypatch.setattr(channel, "_CONNECT_S", 0.2)
    with silent_service() as port:
        change = lambda endpoint: endpoint._replace(port=port)
        results = on_threads(2, lambda collectives: JobWatch(collectives).start(), tampered(change))
    assert all(isinstance(result, JobError) for result in results), results
    assert f"127.0.0.1 port {port} (answered by something other than rank 0 of this job)" in str(results[1])
    monkeypatch.setattr(network, "host_name", lambda: threading.current_thread().name)
    monkeypatch.setattr(network, "host_addresses", lambda: ["127.0.0.1", "127.0.0.9"])
    change = lambda endpoint: endpoint._replace(port=1)
    results = on_threads(2, lambda collectives: JobWatch(collectives).start(), tampered(change))
    assert isinstance(results[0], HvdtrainError)
    assert "127.0.0.1 port 1 (Connection refused); 127.0.0.9 port 1 (Connection refused)" in str(results[0])


SURROGATE = b'{"kind": "hello", "token": "\\ud800", "rank": 1}\n'


def test_other_clients_do_not_delay_the_ranks():
    """While rank 0 waits for rank 1, other clients connect: silent ones, and ones that send invalid messages."""
    clients = []

    def run(collectives: ThreadCollectives) -> None:
        allgather = collectives.allgather

        def with_clients(value: Any) -> list[Any]:
            values = allgather(value)
            if collectives.rank == 1 and hasattr(values[0], "token"):
                for sent in (
                    b"",
                    b"GET / HTTP/1.0\r\n\r\n",
                    b'{"kind": "hello"}\n',
                    SURROGATE,
                    b"[" * 5000 + b"\n",
                    b"\xff\n",
                ):
                    client = socket.create_connection((values[0].addresses[0], values[0].port))
                    client.sendall(sent)
                    clients.append(client)
            return values

        collectives.allgather = with_clients
        with JobWatch(collectives):
            collectives.barrier()
        for client in clients if collectives.rank == 1 else []:
            with client:
                client.settimeout(2)
                with suppress(ConnectionResetError):
                    assert client.recv(100) == b""

    assert on_threads(2, run) == [None] * 2


def wait_for_data(connection: Connection) -> None:
    assert select.select([connection], [], [], 5)[0], "no data arrived"


def test_messages_arrive_complete():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        raw = socket.create_connection(listener.getsockname())
        connection = Connection(listener.accept()[0])
    raw.sendall(b'{"kind": "a"}\n{"ki')
    wait_for_data(connection)
    assert connection.receive() == [{"kind": "a"}]
    raw.sendall(b'nd": "b"}\n')
    wait_for_data(connection)
    assert connection.receive() == [{"kind": "b"}]
    # While the other side does not read, sending does not block; the queue is sent when it reads again.
    while not connection.is_backed_up:
        connection.send({"kind": "x" * 100_000})
    raw.settimeout(5)
    while connection.is_backed_up:
        raw.recv(1 << 20)
        connection.flush()
    raw.close()
    wait_for_data(connection)
    assert connection.receive() == []
    assert connection.is_lost
    connection.close()
