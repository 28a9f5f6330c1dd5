"""What a cut of an elastic job's connections shuts down: those of one start, and no other."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from hvdtrain.distributed import elastic
from hvdtrain.distributed.elastic import ElasticCollectives


@pytest.fixture
def collectives(monkeypatch) -> ElasticCollectives:
    """Without Horovod: what connects are the sockets of the test."""
    monkeypatch.setattr(elastic, "_SHUT_INTERVAL_S", 0.05)
    made = ElasticCollectives.__new__(ElasticCollectives)
    made._sockets_lock, made._sockets, made._sockets_before = threading.Lock(), set(), None
    return made


@contextlib.contextmanager
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as one,
        listener.accept()[0] as other,
    ):
        yield one, other


def is_open(ends: tuple[socket.socket, socket.socket]) -> bool:
    try:
        ends[0].sendall(b"x")
        return ends[1].recv(1) == b"x"
    except OSError:
        return False


def test_a_cut_shuts_what_belongs_to_the_ranks(collectives):
    with contextlib.ExitStack() as stack:
        others = stack.enter_context(connection())
        with collectives._noting_sockets():
            ends = stack.enter_context(connection())
        assert is_open(ends)
        collectives.cut()
        assert not is_open(ends)
        assert is_open(others)


def test_a_cut_shuts_what_a_start_connects_later(collectives):
    with collectives._noting_sockets():
        collectives.cut()
        with connection() as ends:
            time.sleep(0.3)
            assert not is_open(ends)


def test_the_cut_of_a_start_does_not_shut_the_next_one(collectives):
    with collectives._noting_sockets():
        collectives.cut()
    with collectives._noting_sockets(), connection() as ends:
        time.sleep(0.3)
        assert is_open(ends)
