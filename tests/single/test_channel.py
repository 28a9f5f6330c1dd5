"""The connections between the control threads of a job's ranks."""

import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from made_up_jobs import ThreadCollectives, on_threads

from hvdtrain import process
from hvdtrain.errors import HvdtrainError
from hvdtrain.failure import JobError, JobWatch, channel
from hvdtrain.failure.channel import Connection


def test_nothing_listens_and_nothing_is_left():
    descriptors = len(os.listdir("/proc/self/fd"))

    def run(collectives: ThreadCollectives) -> None:
        gather, offers = collectives.allgather, []
        collectives.allgather = lambda value: offers.append(gather(value)) or offers[-1]
        with JobWatch(collectives):
            collectives.barrier()
            offer = offers[1][0]
            assert offer.addresses == ["127.0.0.1"]
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((offer.addresses[0], offer.port))
            collectives.barrier()
            began = time.monotonic()
        assert time.monotonic() - began < 0.5

    assert on_threads(3, run) == [None] * 3
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert not [thread for thread in threading.enumerate() if thread.name == "hvdtrain-control"]


def test_hosts_connect_by_address(monkeypatch):
    """Two made-up hosts; at the first address of the first one nobody answers."""
    addresses = channel.host_addresses()
    if not addresses:
        pytest.skip("this host has no address but its own loopback")
    assert not [address for address in addresses if address.startswith("127.")]
    monkeypatch.setattr(process, "host_name", lambda: threading.current_thread().name)
    monkeypatch.setattr(channel, "host_addresses", lambda: ["255.255.255.255", *addresses])

    def run(collectives: ThreadCollectives) -> bool:
        threading.current_thread().name = "host " + "aab"[collectives.rank]
        with JobWatch(collectives) as watch:
            if collectives.rank == 2:
                watch.request_stop("asked")
            while not watch.stop_is_coming:
                time.sleep(0.001)
            return watch.check()

    assert on_threads(3, run) == [True] * 3


def tampered(change: Any) -> Any:
    """Collectives whose rank 1 gets something else for what rank 0 offers."""

    class Tampered(ThreadCollectives):
        def allgather(self, value: Any) -> list[Any]:
            values = super().allgather(value)
            return [change(values[0])] if self.rank == 1 and hasattr(values[0], "token") else values

    return Tampered


@contextmanager
def stranger() -> Iterator[int]:
    """A service that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_a_wrong_token_is_refused(monkeypatch):
    monkeypatch.setattr(channel, "_TRY_S", 0.2)

    def run(collectives: ThreadCollectives) -> None:
        JobWatch(collectives).start()

    results = on_threads(2, run, tampered(lambda offer: offer._replace(token="0" * 32)))
    assert all(isinstance(result, JobError) for result in results), results
    assert re.search(
        r"Rank 1 on host .* tried: 127\.0\.0\.1 port \d+ \(what answers there is not rank 0", str(results[0])
    )


def test_the_addresses_that_were_tried_are_told(monkeypatch):
    monkeypatch.setattr(channel, "_TRY_S", 0.2)
    with stranger() as port:
        change = lambda offer: offer._replace(port=port)
        results = on_threads(2, lambda collectives: JobWatch(collectives).start(), tampered(change))
    assert all(isinstance(result, JobError) for result in results), results
    assert f"127.0.0.1 port {port} (what answers there is not rank 0 of this job)" in str(results[1])
    monkeypatch.setattr(process, "host_name", lambda: threading.current_thread().name)
    monkeypatch.setattr(channel, "host_addresses", lambda: ["127.0.0.1", "127.0.0.9"])
    change = lambda offer: offer._replace(port=1)
    results = on_threads(2, lambda collectives: JobWatch(collectives).start(), tampered(change))
    assert isinstance(results[0], HvdtrainError)
    assert "127.0.0.1 port 1 (Connection refused); 127.0.0.9 port 1 (Connection refused)" in str(results[0])


def test_strangers_hold_up_nobody():
    """While rank 0 waits for rank 1, others come: silent ones, and ones that talk nonsense."""
    admitted = []

    def run(collectives: ThreadCollectives) -> None:
        gather = collectives.allgather

        def visited(value: Any) -> list[Any]:
            values = gather(value)
            if collectives.rank == 1 and hasattr(values[0], "token"):
                for said in (b"", b"GET / HTTP/1.0\r\n\r\n", b'{"kind": "hello"}\n', b"[" * 5000 + b"\n", b"\xff\n"):
                    visitor = socket.create_connection((values[0].addresses[0], values[0].port))
                    visitor.sendall(said)
                    admitted.append(visitor)
            return values

        collectives.allgather = visited
        with JobWatch(collectives):
            collectives.barrier()
        for visitor in admitted if collectives.rank == 1 else []:
            with visitor:
                visitor.settimeout(2)
                with suppress(ConnectionResetError):
                    assert visitor.recv(100) == b""

    assert on_threads(2, run) == [None] * 2


def test_messages_arrive_whole():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        raw = socket.create_connection(listener.getsockname())
        connection = Connection(listener.accept()[0])
    raw.sendall(b'{"kind": "a"}\n{"ki')
    time.sleep(0.05)
    assert connection.receive() == [{"kind": "a"}]
    raw.sendall(b'nd": "b"}\n')
    time.sleep(0.05)
    assert connection.receive() == [{"kind": "b"}]
    # The other side does not read: nothing blocks, and what is left goes when it reads again.
    while not connection.is_backed_up:
        connection.send({"kind": "x" * 100_000})
    raw.settimeout(5)
    while connection.is_backed_up:
        raw.recv(1 << 20)
        connection.flush()
    raw.close()
    time.sleep(0.05)
    assert connection.receive() == []
    assert connection.is_lost
    connection.close()
