"""Where the ranks of a job over Gloo find each other's addresses. Does not import TensorFlow."""

import threading
from collections import defaultdict

from hvdtrain.distributed.key_value_server import KeyValueServer

_WAIT_S = 2.0
_NAME = "rank_"


class Rendezvous(KeyValueServer):
    """Holds what all ranks put, and answers each rank twice: with all names, and with the addresses for this rank.

    A scope is a group of ranks. In it, Horovod's rank r puts the name of its host as ``rank_r``, and as ``r`` the
    addresses of its connections to each other rank, all of the same length, in the order of ranks. A rank asks for
    ``names-SIZE`` and ``addresses-RANK-SIZE``; see :class:`~hvdtrain.distributed.local_rendezvous.LocalRendezvous`.

    Args:
        host: the address to listen on.
    """

    def __init__(self, host: str):
        super().__init__(host, self.get, self.put)
        self._values: dict[str, dict[str, bytes]] = defaultdict(dict)
        self._numbers: dict[tuple[str, bool], int] = defaultdict(int)
        """How many names, and how many ranks' addresses, a scope has."""
        # Waking all ranks for each value would keep this process busy if there are many of them.
        self._complete: dict[tuple[str, bool, int], threading.Event] = {}
        self._lock = threading.Lock()
        self._is_over = False

    def fail(self) -> None:
        """Makes the start of ranks that still wait for others fail at once.

        Horovod would retry a closed server for another 1.5 s; an empty answer, which is not an address, ends the start.
        """
        with self._lock:
            self._is_over = True
            for each in self._complete.values():
                each.set()

    def close(self) -> None:
        """Stops serving; ranks that wait are released."""
        self.fail()
        super().close()

    def put(self, scope: str, key: str, value: bytes) -> None:
        """Keeps a rank's value."""
        with self._lock:
            kind = scope, key.startswith(_NAME)
            self._numbers[kind] += key not in self._values[scope]
            self._values[scope][key] = value
            if (complete := self._complete.get((*kind, self._numbers[kind]))) is not None:
                complete.set()

    def get(self, scope: str, key: str) -> bytes | None:
        """The names or addresses of all ranks; empty after :meth:`fail`; None if some are missing for a while."""
        what, *numbers = key.split("-")
        if what not in ("names", "addresses") or not all(each.isdecimal() for each in numbers) or not numbers:
            return None
        rank, size = int(numbers[0]), int(numbers[-1])
        kind = scope, what == "names"
        with self._lock:
            complete = self._complete.setdefault((*kind, size), threading.Event())
            if self._is_over or self._numbers[kind] >= size:
                complete.set()
        if not complete.wait(_WAIT_S):
            return None
        with self._lock:
            values = dict(self._values[scope])
        if self._is_over:
            return b""
        if what == "names":
            return b"\n".join(values[f"{_NAME}{each}"] for each in range(size))
        return b"".join(_address(values[str(each)], each, rank, size) for each in range(size))


def _address(addresses: bytes, of: int, to: int, size: int) -> bytes:
    """The address of one rank's connection to another; zeros for that to itself."""
    length = len(addresses) // (size - 1)
    place = to if to < of else to - 1
    return bytes(length) if of == to else addresses[place * length : (place + 1) * length]
