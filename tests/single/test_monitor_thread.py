"""The monitor thread's deadlines, with a clock that the test advances."""

import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from made_up_jobs import wait_until

from hvdtrain.fault_tolerance import monitor_thread
from hvdtrain.fault_tolerance.channel import Channel, Connection
from hvdtrain.fault_tolerance.monitor_thread import MonitorThread
from hvdtrain.fault_tolerance.stall_detection import Position
from hvdtrain.fault_tolerance.stop_consensus import StopPoint

TIMEOUT_S = 8.0
INTERVAL_S = 1.0
"""Between heartbeats."""


class Exited(BaseException):
    """Raised instead of ending the process."""


class MonitoredRank:
    """Rank 0, whose monitor is polled by the test; the test sends rank 1's messages.

    Args:
        connections: both ends of a connection.
        size: the number of ranks; those from the third on are never heard of.
    """

    def __init__(
        self, connections: tuple[Connection, Connection], *, size: int = 2, stall_timeout_s: float = TIMEOUT_S
    ):
        self.now = 100.0
        self.position = Position()
        self.stop_point = StopPoint()
        self._own, self.peer = connections
        self.monitor = MonitorThread(
            0,
            Channel([*"ab", *["c"] * (size - 2)], {1: self._own}),
            stop_point=self.stop_point,
            position=lambda: self.position,
            exit_actions=lambda: None,
            stall_timeout_s=stall_timeout_s,
            clock=lambda: self.now,
        )
        self.poll()

    def poll(self) -> None:
        # Otherwise it waits for the next heartbeat in real time.
        self.monitor.poll(wait_s=0.0)

    def advance(self, seconds: float, *, heartbeats: int | None = None) -> None:
        """Lets time pass in steps of a heartbeat interval; rank 1 sends its number of heartbeats at each if given."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + INTERVAL_S)
            if heartbeats is not None:
                self.send({"kind": "heartbeat", "position": Position(heartbeats, "training", heartbeats)})
            self.poll()

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message from rank 1 and waits until it can be received."""
        self.peer.send(message)
        wait_until(lambda: select.select([self._own], [], [], 1.0)[0])

    def received(self) -> list[str]:
        """Returns the kinds of the messages that rank 1 has received, except heartbeats."""
        return [each["kind"] for each in self.peer.receive() if each["kind"] != "heartbeat"]


@pytest.fixture
def make_rank(monkeypatch) -> Iterator[Callable[..., MonitoredRank]]:
    def exit_process(code: int) -> None:
        raise Exited(code)

    monkeypatch.setattr(os, "_exit", exit_process)
    monkeypatch.setattr(monitor_thread, "_DRAIN_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other = listener.accept()[0]
    made = []

    def make(**options) -> MonitoredRank:
        made.append(MonitoredRank((Connection(one), Connection(other)), **options))
        return made[-1]

    yield make
    for rank in made:
        rank.monitor.abandon()  # Its thread was never started, and close() would wait for it.
        rank.peer.close()


@pytest.fixture
def rank(make_rank) -> MonitoredRank:
    return make_rank()


def test_a_rank_without_heartbeats_is_named_after_the_timeout(rank, capfd):
    rank.advance(TIMEOUT_S)
    assert capfd.readouterr().err == ""
    with pytest.raises(Exited, match="1"):
        rank.advance(INTERVAL_S)
    assert "no heartbeat from rank 1 (host b) for 8 s, last seen before its first step." in capfd.readouterr().err
    assert rank.received() == ["end"]


def test_a_forked_child_leaves_the_connections_of_its_parent_watched(rank, capfd):
    child = os.fork()
    if child == 0:
        rank.monitor.abandon()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    rank.send({"kind": "heartbeat", "position": Position(7, "training", 7)})
    rank.poll()
    with pytest.raises(Exited):
        rank.advance(TIMEOUT_S + INTERVAL_S)
    assert "last seen at step 7 (training)." in capfd.readouterr().err


@pytest.mark.parametrize("suspended_s", [2 * INTERVAL_S + 0.1, 100 * TIMEOUT_S])
def test_a_suspension_of_this_rank_extends_deadlines(rank, suspended_s):
    rank.advance(TIMEOUT_S)
    rank.now += suspended_s
    rank.poll()
    with pytest.raises(Exited):
        rank.advance(INTERVAL_S)


def test_a_late_poll_does_not_extend_deadlines(rank):
    rank.advance(TIMEOUT_S - INTERVAL_S)
    rank.now += 2 * INTERVAL_S
    with pytest.raises(Exited):
        rank.poll()


def test_progress_of_any_rank_is_no_stall(rank):
    rank.position = Position(1, "training", 1)
    for heartbeats in range(3):
        rank.advance(TIMEOUT_S, heartbeats=heartbeats)
    assert rank.received() == []


def test_a_stall_names_the_rank_behind(rank, capfd):
    rank.position = Position(2, "training", 2)
    rank.advance(TIMEOUT_S + 2 * INTERVAL_S, heartbeats=1)
    assert rank.received() == ["send stack"]
    rank.send({"kind": "stack", "position": Position(1, "training", 1), "stack": ["model.py:7, in call"]})
    with pytest.raises(Exited):
        rank.poll()
    lines = capfd.readouterr().err.splitlines()
    assert lines[0].startswith("hvdtrain: no rank made progress for 8 s; the others wait for rank 1 (host b). ")
    assert lines[1:] == ["  rank 1 (host b) at step 1 (training):", "    model.py:7, in call"]


def test_a_stack_that_arrives_after_progress_ends_nothing(rank):
    rank.advance(TIMEOUT_S + INTERVAL_S, heartbeats=0)
    assert rank.received() == ["send stack"]
    rank.send({"kind": "stack", "position": Position(1, "training", 1), "stack": []})
    rank.advance(TIMEOUT_S - INTERVAL_S, heartbeats=1)
    assert rank.received() == []


def test_only_a_later_second_signal_ends_the_process_at_once(rank):
    def signalled() -> None:
        signal.raise_signal(signal.SIGTERM)
        rank.poll()

    rank.monitor.catch_signals()
    signalled()
    assert rank.received() == ["propose"]
    rank.now += INTERVAL_S
    signalled()
    assert rank.stop_point.is_requested
    rank.now += 0.1
    with pytest.raises(Exited, match="75"):
        signalled()
    assert rank.received() == ["end"]


def test_the_launcher_is_watched_every_second_in_large_jobs_too(make_rank, monkeypatch):
    """Their heartbeats are a minute apart; horovodrun waits 5 s for its ranks to end."""
    is_running = True
    monkeypatch.setattr(monitor_thread.processes, "is_running", lambda process: is_running)
    monkeypatch.setattr(monitor_thread.processes, "horovodrun_above", object)
    rank = make_rank(size=8000, stall_timeout_s=0)
    rank.poll()
    is_running = False
    rank.now += INTERVAL_S
    began = time.monotonic()
    rank.monitor.poll()
    assert time.monotonic() - began < 30
    assert rank.received() == ["propose"]
    assert "horovodrun ended" in rank.stop_point.reason
