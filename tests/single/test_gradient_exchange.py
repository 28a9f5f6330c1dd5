"""The messages between ranks that close the updates of a job with a quorum."""

import dataclasses
import socket
import types

import pytest
import tensorflow as tf

from hvdtrain.fault_tolerance.channel import Channel, Connection, wait_for
from hvdtrain.fault_tolerance.closing import ClosingRule
from hvdtrain.training.quorum.exchange import GradientExchange

ZEROS, OWN = [tf.zeros(2)], [tf.ones(2)]
RULE = ClosingRule(active=(0, 1), quorum=1, grace=1e6)


@pytest.fixture
def ends():
    """The connections of rank 0 to rank 1 and of rank 1 to rank 0."""
    first, second = (Connection(each) for each in socket.socketpair())
    yield first, second
    first.close()
    second.close()


def exchange_of(rank: int, connection: Connection) -> GradientExchange:
    """What a rank sends is all that it receives."""
    collectives = types.SimpleNamespace(rank=rank, size=2, sum_on_this_thread=lambda tensors: list(tensors))
    return GradientExchange(collectives, Channel(["a", "a"], {1 - rank: connection}), ZEROS)


def next_message(connection: Connection) -> dict:
    wait_for([connection], 30)
    (message,) = connection.receive()
    return message


def test_a_rank_reports_that_it_begins_only_if_it_missed_the_last_update(ends):
    first, second = ends
    exchange = exchange_of(1, second)
    exchange.begin(0)
    exchange.offer(0, OWN, RULE)
    assert next_message(first)["has_made"] == 0
    first.send({"contributors": [0, 1]})
    assert exchange.take().sums[0].numpy().tolist() == [1, 1]
    exchange.begin(1)
    assert first.receive() == []
    first.send({"contributors": [0]})
    assert exchange.take().sums[0].numpy().tolist() == [0, 0]
    exchange.begin(2)
    assert next_message(first) == {"begins": 2}
    exchange.close()


def test_rank_0_waits_for_ranks_that_compute_and_not_for_others(ends):
    first, second = ends
    exchange = exchange_of(0, first)

    def contributors() -> tuple[int, ...]:
        closed = exchange.take().contributors
        assert next_message(second) == {"contributors": list(closed)}
        return closed

    def make(update: int, *, rule: ClosingRule = RULE) -> None:
        exchange.begin(update)
        exchange.offer(update, OWN, rule)

    def make_on_rank_1(update: int) -> None:
        second.send({"has_made": update, "seconds": 0.1, "rule": dataclasses.asdict(RULE)})

    make(0)
    make_on_rank_1(0)
    assert contributors() == (0, 1)
    make(1, rule=dataclasses.replace(RULE, grace=0.0))
    assert contributors() == (0,)
    # Rank 1 still computes for the update that has closed.
    make(2)
    assert contributors() == (0,)
    second.send({"begins": 3})
    make(3)
    wait_for([second], 0.2)
    assert second.receive() == []
    make_on_rank_1(3)
    assert contributors() == (0, 1)
    exchange.close()
