"""The processes that are connected to the coordinator of an elastic job."""

import contextlib
import selectors
import socket
from collections.abc import Callable, Iterator

from hvdtrain.errors import UsageError
from hvdtrain.fault_tolerance.channel import Connection, Message
from hvdtrain.fault_tolerance.elastic.peer import Peer


class ConnectedPeers:
    """Accepts connections, and waits for what they send.

    Args:
        endpoint: the address and port to listen on; port 0: any.
        clock: returns the time in seconds; monotonic.

    Raises:
        UsageError: this process cannot listen there.
    """

    def __init__(self, endpoint: tuple[str, int], clock: Callable[[], float]):
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
        ready = self._selector.select(timeout_s)
        if any(key.data is None for key, _ in ready):
            self._accept()
        return [key.data for key, _ in ready if key.data is not None]

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                peer = Peer(Connection(self._listener.accept()[0]), self._clock())
                self._peers.append(peer)
                self._selector.register(peer.connection, selectors.EVENT_READ, peer)

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
