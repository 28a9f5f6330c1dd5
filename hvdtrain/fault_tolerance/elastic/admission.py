"""How a process becomes a member of an elastic job: it connects to the coordinator, and is accepted or refused."""

import os
import selectors
import socket
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from hvdtrain.errors import DisagreementError, HvdtrainError, StoppedEarly
from hvdtrain.fault_tolerance.channel import Connection, Message
from hvdtrain.fault_tolerance.elastic.hello import Hello
from hvdtrain.system import environment, network

_CONNECT_S = 10.0
_WELCOME_S = 10.0


class Admission(NamedTuple):
    """A connection to the coordinator that has accepted this process."""

    connection: Connection
    member: int
    """The number of this process in the job."""
    must_warm_up: bool
    """Whether the job trains already, so that this process compiles before it joins."""
    start_size: int
    """The number of ranks that the job starts with."""
    early: list[Message]
    """What the coordinator has sent since then."""


def request_admission(
    endpoint: tuple[str, int], token: str, facts: Mapping[str, Any], *, stall_timeout_s: float
) -> Admission:
    """Connects to the coordinator.

    Args:
        endpoint: where it listens.
        token: proves that this process belongs to the job.
        facts: what must be equal in all processes.
        stall_timeout_s: how long this process may be silent; 0: forever.

    Raises:
        DisagreementError: other processes of the job have other facts.
        StoppedEarly: the job has ended.
        HvdtrainError: the coordinator cannot be reached.
    """
    connection = _connect(endpoint)
    hello = Hello(
        host=network.host_name(),
        pid=os.getpid(),
        worker=environment.elastic_worker(),
        facts=dict(facts),
        stall_timeout_s=stall_timeout_s,
    )
    connection.send(hello.message(token))
    welcome, *early = _first_messages(connection, endpoint)
    if welcome["kind"] == "refused":
        raise DisagreementError(welcome["text"])
    if welcome["kind"] == "end":
        raise StoppedEarly("the job that this process was started for has ended.")
    return Admission(
        connection,
        member=welcome["member"],
        must_warm_up=welcome["must_warm_up"],
        start_size=welcome["start_size"],
        early=early,
    )


def _connect(endpoint: tuple[str, int]) -> Connection:
    until = time.monotonic() + _CONNECT_S
    while True:
        try:
            return Connection(socket.create_connection(endpoint, timeout=_CONNECT_S))
        except OSError as error:
            if time.monotonic() > until:
                raise HvdtrainError(
                    f"the coordinator of the job must be reachable over TCP. Received: {endpoint[0]}:{endpoint[1]} "
                    f"({error.strerror or error})."
                ) from None
        time.sleep(0.2)


def _first_messages(connection: Connection, endpoint: tuple[str, int]) -> list[Message]:
    until = time.monotonic() + _WELCOME_S
    with selectors.PollSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        while not connection.is_lost and time.monotonic() < until:
            selector.select(max(0.0, until - time.monotonic()))
            if messages := connection.receive():
                return messages
    raise HvdtrainError(
        f"the coordinator of the job must accept this process. {endpoint[0]}:{endpoint[1]} did not: is it the "
        "coordinator, and is HVDTRAIN_ELASTIC_TOKEN that of the job?"
    )
