"""Where the ranks of a job over Gloo find each other's addresses. Does not import TensorFlow."""

import re
import threading
from collections import defaultdict

from hvdtrain.distributed.key_value_server import KeyValueServer

_WAIT_S = 2.0
_NAME = "rank_"
_ASKED = re.compile(r"(names|addresses-(?P<rank>\d{1,9}))-(?P<size>\d{1,9})", re.ASCII)


class Rendezvous(KeyValueServer):
    """Holds what all ranks put, and answers each rank twice: with all names, and with the addresses for this rank.

    A scope is a group of ranks. In it, Horovod's rank r puts the name of its host as ``rank_r``, and as ``r`` the
    addresses of its connections to each other rank, all of the same length, in the order of ranks. A rank asks for
    ``names-SIZE`` and ``addresses-RANK-SIZE``; see :mod:`hvdtrain.distributed.local_rendezvous`.

    Args:
        host: the address to listen on.
        token: see :class:`KeyValueServer`.
    """

    def __init__(self, host: str, token: str = ""):
        super().__init__(host, self.get, self.put, token)
        self._lock = threading.Lock()
        # Of names and of addresses, by scope.
        self._values: dict[tuple[str, bool], dict[str, bytes]] = defaultdict(dict)
        # By scope and number of ranks. Waking all ranks for each value would keep this process busy if there are many.
        self._complete: dict[tuple[str, bool], dict[int, threading.Event]] = defaultdict(dict)
        self._is_over = False

    def fail(self) -> None:
        """Makes the start of ranks that still wait for others fail at once.

        Horovod would retry a closed server for another 1.5 s; an empty answer, which is not an address, ends the start.
        """
        with self._lock:
            self._is_over = True
            for events in self._complete.values():
                for each in events.values():
                    each.set()

    def close(self) -> None:
        """Stops serving; ranks that wait are released."""
        self.fail()
        super().close()

    def put(self, scope: str, key: str, value: bytes) -> None:
        """Keeps a rank's value."""
        kind = scope, key.startswith(_NAME)
        with self._lock:
            self._values[kind][key.removeprefix(_NAME)] = value
            for size, complete in self._complete[kind].items():
                if self._has_all(kind, size):
                    complete.set()

    def get(self, scope: str, key: str) -> bytes | None:
        """The names or addresses of all ranks; empty after :meth:`fail`; None if some are missing for a while."""
        asked = _ASKED.fullmatch(key)
        if asked is None:
            return None
        kind, size = (scope, asked["rank"] is None), int(asked["size"])
        with self._lock:
            complete = self._complete[kind].setdefault(size, threading.Event())
            if self._is_over or self._has_all(kind, size):
                complete.set()
        if not complete.wait(_WAIT_S):
            return None
        if self._is_over:
            return b""
        with self._lock:
            values = [self._values[kind][str(rank)] for rank in range(size)]
        if asked["rank"] is None:
            return b"\n".join(values)
        to = int(asked["rank"])
        return b"".join(_address(addresses, of, to, size) for of, addresses in enumerate(values))

    def _has_all(self, kind: tuple[str, bool], size: int) -> bool:
        values = self._values[kind]
        return len(values) >= size and all(str(rank) in values for rank in range(size))


def _address(addresses: bytes, of: int, to: int, size: int) -> bytes:
    """The address of one rank's connection to another; zeros for that to itself."""
    length = len(addresses) // max(1, size - 1)
    place = to if to < of else to - 1
    return bytes(length) if of == to else addresses[place * length : (place + 1) * length]
