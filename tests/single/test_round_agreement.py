"""The messages between ranks that end the rounds of local SGD without waiting."""

import socket
import types

import pytest

from hvdtrain.fault_tolerance.channel import Channel, Connection, wait_for
from hvdtrain.local_sgd import round_agreement
from hvdtrain.local_sgd.round_agreement import RoundAgreement

LONG = 1e6
"""A grace period that does not end."""


@pytest.fixture
def agreement_of(monkeypatch):
    """Makes the agreement of a rank of two; returns it and the connection of the other rank."""
    made = []

    def make(rank: int, *options) -> tuple[RoundAgreement, Connection]:
        own, other = (Connection(each) for each in socket.socketpair())
        monkeypatch.setattr(round_agreement, "open_channel", lambda collectives: Channel(["a", "a"], {1 - rank: own}))
        made.extend([agreement := RoundAgreement(types.SimpleNamespace(rank=rank, size=2), *options), other])
        return agreement, other

    yield make
    for each in made:
        each.close()


def report(number: int, *, is_finished: bool = False) -> dict:
    return {"is_ready_to_end": number, "seconds": 0.1, "is_finished": is_finished}


def next_message(connection: Connection) -> dict:
    wait_for([connection], 30)
    (message,) = connection.receive()
    return message


def test_rank_0_waits_for_all_and_counts_each_report_for_its_round_only(agreement_of):
    agreement, other = agreement_of(0, None, 0.0)
    assert not agreement.has_ended(is_ready=True)
    other.send(report(0))
    assert agreement.has_ended(is_ready=True)
    assert next_message(other) == {"ended": 1}
    # Sent before that rank had heard of the end.
    other.send(report(0))
    assert not agreement.has_ended(is_ready=True)
    other.send(report(1))
    assert agreement.has_ended(is_ready=True)
    assert next_message(other) == {"ended": 2}


def test_a_quorum_gives_the_others_time_also_one_that_was_late_before(agreement_of, monkeypatch):
    now_s = 0.0
    monkeypatch.setattr(round_agreement, "time", types.SimpleNamespace(monotonic=lambda: now_s))
    agreement, other = agreement_of(0, 1, 0.5)
    for number in (1, 2):
        now_s += 1.0
        assert not agreement.has_ended(is_ready=True)
        now_s += 0.4
        assert not agreement.has_ended(is_ready=True)
        now_s += 0.2
        assert agreement.has_ended(is_ready=True)
        assert next_message(other) == {"ended": number}
    agreement, other = agreement_of(0, 1, LONG)
    other.send(report(0))
    assert not agreement.has_ended(is_ready=False)
    assert agreement.has_ended(is_ready=True)
    assert next_message(other) == {"ended": 1}


def test_a_rank_that_makes_no_more_steps_is_no_quorum(agreement_of):
    agreement, other = agreement_of(0, 1, 0.0)
    other.send(report(0, is_finished=True))
    wait_for([agreement._connections[1]], 30)
    assert not agreement.has_ended(is_ready=False)
    assert agreement.has_ended(is_ready=True)
    other.send(report(1, is_finished=True))
    wait_for([agreement._connections[1]], 30)
    assert not agreement.has_ended(is_ready=False)
    agreement.wait()


def test_another_rank_reports_once_and_follows(agreement_of):
    agreement, other = agreement_of(1, None, 0.0)
    for _ in range(3):
        assert not agreement.has_ended(is_ready=True)
    received = next_message(other)
    assert received == {**report(0), "seconds": received["seconds"]}
    assert received["seconds"] >= 0
    other.send({"ended": 1})
    agreement.wait()
    assert not agreement.has_ended(is_ready=False)
    assert other.receive() == []
    # Ended before this rank was ready.
    other.send({"ended": 2})
    wait_for([agreement._connections[0]], 30)
    assert agreement.has_ended(is_ready=False)


def test_a_rank_alone_ends_its_rounds(monkeypatch):
    monkeypatch.setattr(round_agreement, "open_channel", lambda collectives: Channel(["a"], {}))
    agreement = RoundAgreement(types.SimpleNamespace(rank=0, size=1), 3, 0.25)
    assert not agreement.has_ended(is_ready=False)
    assert agreement.has_ended(is_ready=True)
    agreement.wait()
    agreement.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_rank_is_noticed_after_its_last_messages(rank, agreement_of):
    agreement, other = agreement_of(rank, None, 0.0)
    other.send({"ended": 1} if rank else report(0))
    other.shut_down()
    if rank:
        assert agreement.has_ended(is_ready=True)
    with pytest.raises(ConnectionError, match=f"lost connection to rank {1 - rank}, .* Horovod"):
        agreement.wait()
