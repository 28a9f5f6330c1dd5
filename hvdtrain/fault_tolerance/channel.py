"""TCP connections between rank 0 and all other ranks, independent of MPI and Horovod.

One allgather at the start exchanges the addresses, so that it works with any launcher.
"""

import contextlib
import hmac
import json
import secrets
import selectors
import socket
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from hvdtrain.errors import HvdtrainError
from hvdtrain.fault_tolerance.collective_errors import on_every_rank
from hvdtrain.fault_tolerance.open_files import allow_connections
from hvdtrain.system import network

if TYPE_CHECKING:
    from hvdtrain.distributed.collectives import Collectives

Message: TypeAlias = dict[str, Any]

_LOOPBACK = "127.0.0.1"
_CONNECT_S = 3.0
# Rank 0 accepts 4,096 ranks in about a second on a free core, and in 4 on one that others use (measured).
_CONNECT_S_PER_RANK = 5e-3
_CHUNK_BYTES = 65536
# Room for other clients, such as port scanners: with a full queue, ranks would wait a second to connect.
_EXTRA_BACKLOG = 100
# No rank sends a longer line.
MAX_LINE_BYTES = 1 << 20


class Connection:
    """Non-blocking exchange of newline-delimited JSON with one rank.

    Args:
        connected: a connected socket.
    """

    def __init__(self, connected: socket.socket):
        connected.setblocking(False)
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connected
        self._received = b""
        self._unsent = b""
        self.max_line_bytes = MAX_LINE_BYTES
        """A longer line ends the connection."""
        self.is_lost = False
        """True when nothing more can be received."""

    def fileno(self) -> int:
        """Returns the file descriptor, for selectors."""
        return self._socket.fileno()

    @property
    def address(self) -> str:
        """This host's address in the connection."""
        return str(self._socket.getsockname()[0])

    @property
    def is_backed_up(self) -> bool:
        """True while sent messages are still queued on this side."""
        return bool(self._unsent)

    def send(self, message: Message) -> None:
        """Sends as much as the socket accepts at once; :meth:`flush` sends the rest."""
        self.send_line(line_of(message))

    def send_line(self, line: bytes) -> None:
        """Sends a message that :func:`line_of` has encoded, perhaps for many ranks."""
        self._unsent += line
        self.flush()

    def flush(self) -> None:
        """Sends as much of the queue as the socket accepts."""
        while self._unsent:
            try:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
            except BlockingIOError:
                return
            except OSError:
                # The other side has closed. Its last messages can still be received, and then the end of the stream.
                self._unsent = b""

    def receive(self) -> list[Message]:
        """Returns the messages that have arrived completely."""
        while not self.is_lost:
            try:
                data = self._socket.recv(_CHUNK_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self._received += data
            self.is_lost = not data or len(self._received) > self.max_line_bytes
        *lines, self._received = self._received.split(b"\n")
        messages = []
        for line in lines:
            message = _parsed(line)
            if message is None:
                self.is_lost = True
                break
            messages.append(message)
        return messages

    def shut_down(self) -> None:
        """Ends the exchange in both directions; a thread that waits for the connection wakes up."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the connection."""
        self._socket.close()


def line_of(message: Message) -> bytes:
    """A message as it is sent."""
    return json.dumps(message).encode() + b"\n"


class Channel(NamedTuple):
    """A rank's connections to other ranks."""

    hosts: list[str]
    """The host name of each rank."""
    connections: dict[int, Connection]
    """By rank: on rank 0 to all other ranks, on other ranks to rank 0."""


class _Endpoint(NamedTuple):
    addresses: list[str]
    port: int
    token: str


def open_channel(collectives: "Collectives") -> Channel:
    """Connects all ranks to rank 0. Collective: all ranks must call it.

    Raises:
        JobError: on all ranks, if one cannot connect to rank 0.
    """
    hosts: list[str] = collectives.allgather(network.host_name())
    if collectives.size == 1:
        return Channel(hosts, {})
    if collectives.rank == 0:
        return Channel(hosts, _accept_ranks(collectives, is_one_host=len(set(hosts)) == 1))
    endpoint: _Endpoint = collectives.allgather(None)[0]
    if hosts[collectives.rank] == hosts[0]:
        endpoint = endpoint._replace(addresses=[_LOOPBACK])
    timeout_s = connect_timeout_s(collectives.size)
    connection = on_every_rank(
        lambda: _connect_to_first_rank(endpoint, collectives.rank, hosts[0], timeout_s), collectives
    )
    return Channel(hosts, {0: connection})


def connect_timeout_s(size: int) -> float:
    """How long a rank of a job with this many may take to connect to rank 0."""
    return _CONNECT_S + size * _CONNECT_S_PER_RANK


def _accept_ranks(collectives: "Collectives", is_one_host: bool) -> dict[int, Connection]:
    address = (_LOOPBACK if is_one_host else "", 0)
    with socket.create_server(address, backlog=collectives.size + _EXTRA_BACKLOG) as listener:
        addresses = [_LOOPBACK] if is_one_host else network.host_addresses()
        endpoint = _Endpoint(addresses, listener.getsockname()[1], secrets.token_hex(16))
        collectives.allgather(endpoint)
        # By then a rank that is missing has tried all addresses, and raises an error with the causes.
        until = time.monotonic() + connect_timeout_s(collectives.size) * (len(addresses) + 1)
        return on_every_rank(lambda: _accept(listener, endpoint.token, collectives.size, until), collectives)


def _accept(listener: socket.socket, token: str, size: int, until: float) -> dict[int, Connection]:
    """Accepts the connections of all other ranks; closes those without the token."""
    allow_connections(size)
    listener.setblocking(False)
    ranks: dict[int, Connection] = {}
    with selectors.PollSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        # Connections that have not sent their rank yet are registered. One that never does delays no other.
        while len(ranks) < size - 1 and (left_s := until - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                if key.fileobj is listener:
                    for connection in _new_connections(listener):
                        selector.register(connection, selectors.EVENT_READ, connection)
                    continue
                connection = key.data
                messages = connection.receive()
                if not messages and not connection.is_lost:
                    continue
                selector.unregister(connection)
                if messages and _is_admitted(messages[0], token, size):
                    # A rank connects again if its first attempt timed out.
                    ranks[messages[0]["rank"]] = connection
                    connection.send({"kind": "welcome"})
                else:
                    connection.close()
        for key in selector.get_map().values():
            if key.data is not None:
                key.data.close()
    return ranks


def _new_connections(listener: socket.socket) -> Iterator[Connection]:
    """Accepts all connections that wait."""
    with contextlib.suppress(OSError):  # There is none, or it was closed again.
        while True:
            yield Connection(listener.accept()[0])


def _is_admitted(message: Message, token: str, size: int) -> bool:
    rank = message.get("rank")
    return (
        message.get("kind") == "hello"
        # JSON may hold half a surrogate pair, which has no encoding.
        and hmac.compare_digest(str(message.get("token")).encode(errors="replace"), token.encode())
        and isinstance(rank, int)
        and 0 < rank < size
    )


def _connect_to_first_rank(endpoint: _Endpoint, rank: int, host: str, timeout_s: float) -> Connection:
    tried = []
    for address in endpoint.addresses:
        until = time.monotonic() + timeout_s
        try:
            connected = socket.create_connection((address, endpoint.port), timeout=timeout_s)
        except OSError as error:
            tried.append(f"{address} port {endpoint.port} ({error.strerror or error})")
            continue
        connection = Connection(connected)
        connection.send({"kind": "hello", "token": endpoint.token, "rank": rank})
        if _answer(connection, until) == {"kind": "welcome"}:
            return connection
        connection.close()
        # Private container networks use the same addresses on every host.
        tried.append(f"{address} port {endpoint.port} (answered by something other than rank 0 of this job)")
    raise HvdtrainError(
        f"every rank must be able to connect to rank 0 (host {host}) over TCP, to detect lost ranks. Rank {rank} "
        f"(host {network.host_name()}) tried: {'; '.join(tried) or 'nothing, since that host has no IPv4 address'}. "
        "Allow TCP connections between the job's hosts on ephemeral ports."
    )


def _answer(connection: Connection, until: float) -> Message | None:
    while not connection.is_lost and time.monotonic() < until:
        wait_for([connection], until - time.monotonic())
        messages = connection.receive()
        if messages:
            return messages[0]
    return None


def wait_for(readable: Sequence[socket.socket | Connection], timeout_s: float | None) -> None:
    """Waits until one of these can be read, or the timeout has passed; None: forever."""
    # select.select accepts no descriptor above 1023, which a job with many open files exceeds.
    with selectors.PollSelector() as selector:
        for each in readable:
            selector.register(each, selectors.EVENT_READ)
        selector.select(None if timeout_s is None else max(0.0, timeout_s))


def _parsed(line: bytes) -> Message | None:
    """Returns None for a line that no rank would send."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None
