"""Messages between rank 0 and every other rank over TCP, apart from MPI and Horovod.

The addresses travel by one gathering at the start, whatever launcher started the ranks.
"""

import contextlib
import fcntl
import hmac
import json
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from hvdtrain import process
from hvdtrain.errors import HvdtrainError
from hvdtrain.failure.ending import on_every_rank

if TYPE_CHECKING:
    from hvdtrain.collectives import Collectives

Message: TypeAlias = dict[str, Any]

_LOOPBACK = "127.0.0.1"
_TRY_S = 3.0
_SIOCGIFADDR = 0x8915
_CHUNK = 65536
# Such as port scanners: a queue that is full makes those behind them wait for a second.
_STRANGERS = 100
# Nobody of ours sends a longer line.
_LINE_LIMIT = 1 << 20


class Connection:
    """Newline-delimited JSON to and from one rank; neither side ever waits for the other.

    Args:
        opened: a connected socket.
    """

    def __init__(self, opened: socket.socket):
        opened.setblocking(False)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = opened
        self._received = b""
        self._unsent = b""
        self.is_lost = False
        """True when nothing more can be received."""

    def fileno(self) -> int:
        """The descriptor, for a selector."""
        return self._socket.fileno()

    @property
    def is_backed_up(self) -> bool:
        """True while the other side does not take what was sent."""
        return bool(self._unsent)

    def send(self, message: Message) -> None:
        """Sends as much as the system takes at once; :meth:`flush` the rest."""
        self._unsent += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Tries once more to send what is left."""
        while self._unsent:
            try:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
            except BlockingIOError:
                return
            except OSError:
                # The other side is gone. What it said before can still be read, and then its end is seen.
                self._unsent = b""

    def receive(self) -> list[Message]:
        """The messages that have come in whole."""
        while not self.is_lost:
            try:
                data = self._socket.recv(_CHUNK)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self._received += data
            self.is_lost = not data or len(self._received) > _LINE_LIMIT
        *lines, self._received = self._received.split(b"\n")
        messages = []
        for line in lines:
            message = _parsed(line)
            if message is None:
                self.is_lost = True
                break
            messages.append(message)
        return messages

    def close(self) -> None:
        """Ends the connection."""
        self._socket.close()


class Channel(NamedTuple):
    """What a rank is connected to."""

    hosts: list[str]
    """The host's name of every rank."""
    connections: dict[int, Connection]
    """By rank: to all others on rank 0, to rank 0 on all others."""


class _Offer(NamedTuple):
    addresses: list[str]
    port: int
    token: str


def open_channel(collectives: "Collectives") -> Channel:
    """Connects every rank with rank 0. Every rank has to call it.

    Raises:
        JobError: on every rank, where one does not reach rank 0.
    """
    hosts: list[str] = collectives.allgather(process.host_name())
    if collectives.size == 1:
        return Channel(hosts, {})
    if collectives.rank == 0:
        return Channel(hosts, _await_ranks(collectives, is_one_host=len(set(hosts)) == 1))
    offer: _Offer = collectives.allgather(None)[0]
    if hosts[collectives.rank] == hosts[0]:
        offer = offer._replace(addresses=[_LOOPBACK])
    connection = on_every_rank(lambda: _reach_first_rank(offer, collectives.rank, hosts[0]), collectives)
    return Channel(hosts, {0: connection})


def host_addresses() -> list[str]:
    """This host's IPv4 addresses that other hosts may reach: those of its interfaces and of its name."""
    found = [_interface_address(name) for _, name in socket.if_nameindex()]
    with contextlib.suppress(OSError):  # The name may be known to nobody; the interfaces are.
        found += [str(each[4][0]) for each in socket.getaddrinfo(process.host_name(), None, socket.AF_INET)]
    return list(dict.fromkeys(each for each in found if each is not None and not each.startswith("127.")))


def _interface_address(name: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None  # It has none.
    # A struct ifreq: 16 bytes of name, then a struct sockaddr_in with the address after family and port.
    return socket.inet_ntoa(answer[20:24])


def _await_ranks(collectives: "Collectives", is_one_host: bool) -> dict[int, Connection]:
    address = (_LOOPBACK if is_one_host else "", 0)
    with socket.create_server(address, backlog=collectives.size + _STRANGERS) as listener:
        addresses = [_LOOPBACK] if is_one_host else host_addresses()
        offer = _Offer(addresses, listener.getsockname()[1], secrets.token_hex(16))
        collectives.allgather(offer)
        # Who is missing then has had the time to try them all, and tells so.
        until = time.monotonic() + _TRY_S * (len(addresses) + 1)
        return on_every_rank(lambda: _accept(listener, offer.token, collectives.size, until), collectives)


def _accept(listener: socket.socket, token: str, size: int, until: float) -> dict[int, Connection]:
    """Takes in the ranks as they come; whoever does not know the token is sent away."""
    listener.setblocking(False)
    ranks: dict[int, Connection] = {}
    # Those who have not said yet who they are. A stranger among them holds up nobody.
    newcomers: list[Connection] = []
    while len(ranks) < size - 1 and time.monotonic() < until:
        _wait_for([listener, *newcomers], until)
        with contextlib.suppress(OSError):  # None is new, or it has gone again.
            newcomers.append(Connection(listener.accept()[0]))
        for newcomer in list(newcomers):
            messages = newcomer.receive()
            if not messages and not newcomer.is_lost:
                continue
            newcomers.remove(newcomer)
            if messages and _is_admitted(messages[0], token, size):
                # It comes again where its first try took it too long.
                ranks[messages[0]["rank"]] = newcomer
                newcomer.send({"kind": "welcome"})
            else:
                newcomer.close()
    for newcomer in newcomers:
        newcomer.close()
    return ranks


def _is_admitted(message: Message, token: str, size: int) -> bool:
    rank = message.get("rank")
    return (
        message.get("kind") == "hello"
        and hmac.compare_digest(str(message.get("token")).encode(), token.encode())
        and isinstance(rank, int)
        and 0 < rank < size
    )


def _reach_first_rank(offer: _Offer, rank: int, host: str) -> Connection:
    tried = []
    for address in offer.addresses:
        until = time.monotonic() + _TRY_S
        try:
            opened = socket.create_connection((address, offer.port), timeout=_TRY_S)
        except OSError as error:
            tried.append(f"{address} port {offer.port} ({error.strerror or error})")
            continue
        connection = Connection(opened)
        connection.send({"kind": "hello", "token": offer.token, "rank": rank})
        if _answer(connection, until) == {"kind": "welcome"}:
            return connection
        connection.close()
        # Private networks of containers have the same addresses on every host.
        tried.append(f"{address} port {offer.port} (what answers there is not rank 0 of this job)")
    raise HvdtrainError(
        f"every rank must reach rank 0 (host {host}) over TCP, for ranks to notice each other's end. Rank {rank} on "
        f"host {process.host_name()} tried: {'; '.join(tried) or 'nothing, for that host has no IPv4 address'}. "
        "Let the job's hosts connect to each other on ports of the system's choice."
    )


def _answer(connection: Connection, until: float) -> Message | None:
    while not connection.is_lost and time.monotonic() < until:
        _wait_for([connection], until)
        messages = connection.receive()
        if messages:
            return messages[0]
    return None


def _wait_for(readable: Sequence[socket.socket | Connection], until: float) -> None:
    # select.select takes no descriptor beyond 1023, which a job with many files open exceeds.
    with selectors.PollSelector() as selector:
        for each in readable:
            selector.register(each, selectors.EVENT_READ)
        selector.select(max(0.0, until - time.monotonic()))


def _parsed(line: bytes) -> Message | None:
    """None for what no rank would say."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None
