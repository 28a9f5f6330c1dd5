"""What a rank's Horovod asks of the rendezvous, asked once for all ranks. Does not import TensorFlow."""

import contextlib
import http.client
import threading
from collections.abc import Iterator, Mapping

from hvdtrain.distributed.key_value_server import KeyValueServer

_HOST = "127.0.0.1"
_TIMEOUT_S = 30.0
_NOT_FOUND = 404


@contextlib.contextmanager
def local_rendezvous(place: Mapping[str, int], rendezvous: tuple[str, int]) -> Iterator[tuple[str, int]]:
    """In the block, answers Horovod at the address and port that it yields.

    Horovod asks for the addresses of all connections of each other rank: of N ranks, for N² values of N addresses. A
    server for 1,024 ranks would answer for half an hour.

    Args:
        place: see :func:`~hvdtrain.system.environment.set_place`.
        rendezvous: the address and port of the job's :class:`~hvdtrain.distributed.rendezvous.Rendezvous`.
    """
    answers = _Answers(place, rendezvous)
    server = KeyValueServer(_HOST, answers.get, answers.put)
    server.start()
    try:
        yield _HOST, server.port
    finally:
        server.close()


class _Answers:
    def __init__(self, place: Mapping[str, int], rendezvous: tuple[str, int]):
        self._places = {
            "global": (place["rank"], place["size"]),
            "local": (place["local_rank"], place["local_size"]),
            "cross": (place["cross_rank"], place["cross_size"]),
        }
        self._rendezvous = rendezvous
        self._lock = threading.Lock()
        self._gathered: dict[tuple[str, str], bytes] = {}

    def put(self, scope: str, key: str, value: bytes) -> None:
        # If it is lost, the answers are empty.
        self._request("PUT", scope, key, value)

    def get(self, scope: str, key: str) -> bytes | None:
        """What Horovod expects; an empty answer, which ends the start, if the rendezvous has ended."""
        rank, size = self._places[scope.partition("_")[0]]
        if key.startswith("rank_"):
            names = self._gather(scope, f"names-{size}")
            return names and names.split(b"\n")[int(key.removeprefix("rank_"))]
        addresses = self._gather(scope, f"addresses-{rank}-{size}")
        if not addresses:
            return addresses
        length, other = len(addresses) // size, int(key)
        # Horovod reads one of them.
        answer = bytearray((size - 1) * length)
        place = rank if rank < other else rank - 1
        answer[place * length : (place + 1) * length] = addresses[other * length : (other + 1) * length]
        return bytes(answer)

    def _gather(self, scope: str, key: str) -> bytes | None:
        with self._lock:
            if (scope, key) not in self._gathered:
                answer = self._request("GET", scope, key)
                if answer is None:
                    return None
                self._gathered[scope, key] = answer
            return self._gathered[scope, key]

    def _request(self, method: str, scope: str, key: str, value: bytes | None = None) -> bytes | None:
        connection = http.client.HTTPConnection(*self._rendezvous, timeout=_TIMEOUT_S)
        try:
            connection.request(method, f"/{scope}/{key}", value)
            response = connection.getresponse()
            return None if response.status == _NOT_FOUND else response.read()
        except (OSError, http.client.HTTPException):
            return b""
        finally:
            connection.close()
