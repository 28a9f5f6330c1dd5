"""Rate, delay, queueing and loss of the lab's links; tests/cluster measures them from inside."""

import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "launch" / "lab"))

from links import Line

RATE_BITS, DELAY_S = 8e6, 0.01
"""A packet of 1000 bytes takes 1 ms."""


def packet(connection: int, number: int = 0) -> bytes:
    return bytes([number]) * 12 + bytes([connection]) * 12 + bytes(976)


def arrivals(line: Line, until_s: float) -> list[tuple[float, int, int]]:
    """Arrival time, connection and number of each packet, as processed without delay."""
    seen = []
    while (now := line.next_s()) <= until_s:
        seen += [(round(now, 6), each[12], each[0]) for _, each in line.arrived(now)]
    return seen


def test_line_has_rate_and_delay():
    line = Line(RATE_BITS, DELAY_S, loss=0)
    assert line.next_s() == math.inf
    for number in range(3):
        line.send(1.0, 2, packet(1, number))
    assert arrivals(line, 2) == [(1.011, 1, 0), (1.012, 1, 1), (1.013, 1, 2)]
    line.send(5.0, 2, packet(1))
    assert arrivals(line, 6) == [(5.011, 1, 0)]


def test_connections_are_served_round_robin_and_new_ones_first():
    line = Line(RATE_BITS, DELAY_S, loss=0)
    for number in range(3):
        line.send(0.0, 2, packet(1, number))
    line.send(0.0, 2, packet(2, 0))
    line.send(0.0, 2, packet(2, 1))
    assert [each[1:] for each in arrivals(line, 1)] == [(2, 0), (1, 0), (2, 1), (1, 1), (1, 2)]


def test_packets_that_would_queue_for_half_a_second_are_dropped():
    line = Line(RATE_BITS, DELAY_S, loss=0)
    for _ in range(2000):
        line.send(0.0, 2, packet(1))
    assert len(arrivals(line, 10)) == pytest.approx(500, abs=2)


def test_loss_rate():
    line = Line(1e12, 0, loss=0.3)
    for _ in range(10_000):
        line.send(0.0, 2, packet(1))
    assert len(arrivals(line, 10)) == pytest.approx(7000, abs=300)  # six standard deviations
