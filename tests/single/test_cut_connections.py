"""What a cut of an elastic job's connections shuts down: those of one start, and no other."""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from hvdtrain.distributed import elastic
from hvdtrain.distributed.elastic import ElasticCollectives
from hvdtrain.system import environment
from hvdtrain.system.launcher import Launcher


@pytest.fixture
def collectives(monkeypatch) -> ElasticCollectives:
    """Without Horovod: what connects are the sockets of the test."""
    monkeypatch.setattr(elastic, "_SHUT_INTERVAL_S", 0.05)
    for name in ("set_place", "set_gloo_timeout_of_restarts"):
        monkeypatch.setattr(environment, name, lambda *_: None)
    for name in ("init", "shutdown"):
        monkeypatch.setattr(f"horovod.tensorflow.{name}", lambda: None)
    monkeypatch.setattr("horovod.tensorflow.size", lambda: 1)
    return ElasticCollectives(Launcher("none", 0, 1, None, False))


@pytest.fixture
def restart(collectives, monkeypatch) -> Callable[[Callable[[], object]], None]:
    """Starts the collectives again: the ranks connect as a function does."""

    def restart(connect: Callable[[], object]) -> None:
        monkeypatch.setattr("horovod.tensorflow.init", connect)
        collectives.restart({"size": 2}, "lo", ("127.0.0.1", 1))

    return restart


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """It listens before a start: a cut that shuts what the start opens must not shut it before it accepts."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


@contextlib.contextmanager
def connection(listener: socket.socket) -> Iterator[tuple[socket.socket, socket.socket]]:
    with (
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


def test_a_cut_shuts_what_belongs_to_the_ranks(collectives, restart, listener):
    with contextlib.ExitStack() as stack:
        others = stack.enter_context(connection(listener))
        connected = []
        restart(lambda: connected.append(stack.enter_context(connection(listener))))
        (ends,) = connected
        assert is_open(ends)
        collectives.cut()
        assert not is_open(ends)
        assert is_open(others)


def test_a_cut_shuts_what_a_start_connects_later(collectives, restart, listener):
    def connect() -> None:
        collectives.cut()
        with connection(listener) as ends:
            time.sleep(0.3)
            assert not is_open(ends)

    restart(connect)


def test_the_cut_of_a_start_does_not_shut_the_next_one(collectives, restart, listener):
    def connect() -> None:
        with connection(listener) as ends:
            time.sleep(0.3)
            assert is_open(ends)

    restart(collectives.cut)
    restart(connect)
