"""The processes that are connected to the coordinator of an elastic job."""

import selectors
import socket
from collections.abc import Callable, Iterator

from hvdtrain.errors import UsageError
from hvdtrain.fault_tolerance.channel import Connection, Message
from hvdtrain.fault_tolerance.elastic.peer import Peer

# Of connections that have not shown the token yet: anybody can open them.
_MAX_STRANGERS = 64
_STRANGER_S = 10.0
_MAX_HELLO_BYTES = 1 << 16
_PAUSE_S = 1.0
"""How long no connection is accepted after one could not be, such as for lack of file descriptors."""


class ConnectedPeers:
    """Accepts connections, and waits for what they send. Strangers can neither fill it nor end the job.

    Args:
        endpoint: the address and port to listen on; port 0: any.
        clock: returns the time in seconds; monotonic.
        say: prints a message.

    Raises:
        UsageError: this process cannot listen there.
    """

    def __init__(self, endpoint: tuple[str, int], clock: Callable[[], float], say: Callable[[str], None]):
        try:
            self._listener = socket.create_server(endpoint, backlog=100)
        except OSError as error:
            where = f"{endpoint[0]}:{endpoint[1]}"
            raise UsageError(f"a coordinator must be able to listen at {where}. Received: {error.strerror}") from None
        self._listener.setblocking(False)
        self._clock = clock
        self._selector = selectors.PollSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._peers: list[Peer] = []
        self._say = say
        self._paused_until: float | None = None

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def __iter__(self) -> Iterator[Peer]:
        """All of them, including those that were disconnected meanwhile."""
        return iter(list(self._peers))

    def __len__(self) -> int:
        return len(self._peers)

    def __contains__(self, peer: Peer) -> bool:
        return peer in self._peers

    @property
    def training(self) -> list[Peer]:
        """Those that are part of the current generation."""
        return [peer for peer in self._peers if peer.trains]

    def wait(self, timeout_s: float) -> list[Peer]:
        """Waits at most this long and accepts connections; returns the processes that have sent something."""
        if self._paused_until is not None and self._clock() >= self._paused_until:
            self._paused_until = None
            self._selector.register(self._listener, selectors.EVENT_READ)
        ready = self._selector.select(timeout_s)
        if any(key.data is None for key, _ in ready):
            self._accept()
        self._disconnect_strangers()
        return [key.data for key, _ in ready if key.data is not None and key.data in self._peers]

    def _accept(self) -> None:
        while True:
            try:
                connected = self._listener.accept()[0]
            except BlockingIOError:
                return
            except OSError as error:
                self._say(f"a process cannot be connected ({error.strerror}); trying again in {_PAUSE_S:g} s")
                self._selector.unregister(self._listener)
                self._paused_until = self._clock() + _PAUSE_S
                return
            peer = Peer(Connection(connected), self._clock())
            peer.connection.max_line_bytes = _MAX_HELLO_BYTES
            self._peers.append(peer)
            self._selector.register(peer.connection, selectors.EVENT_READ, peer)

    def _disconnect_strangers(self) -> None:
        """Those that have said nothing for too long, and the oldest of too many."""
        strangers = [peer for peer in self._peers if peer.member is None and not peer.was_member]
        now = self._clock()
        for i, peer in enumerate(strangers):
            if len(strangers) - i > _MAX_STRANGERS or now - peer.received_at > _STRANGER_S:
                self.disconnect(peer)

    def send_training(self, message: Message) -> None:
        """Sends a message to all that are part of the current generation."""
        for peer in self.training:
            peer.connection.send(message)

    def disconnect(self, peer: Peer) -> None:
        """Closes a connection."""
        self._selector.unregister(peer.connection)
        peer.connection.close()
        self._peers.remove(peer)

    def close(self) -> None:
        """Closes all connections, and accepts no more."""
        for peer in self._peers:
            peer.connection.close()
        self._selector.close()
        self._listener.close()
