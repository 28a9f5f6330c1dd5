"""What a rank's Horovod asks of the rendezvous, asked once for all ranks. Does not import TensorFlow."""

import contextlib
import http.client
import threading
from collections.abc import Iterator, Mapping

from hvdtrain.distributed.key_value_server import KeyValueServer, authorization

_HOST = "127.0.0.1"
# Thousands of ranks are answered within a minute.
_TIMEOUT_S = 120.0
_ATTEMPTS = 3
_OK, _NOT_FOUND = 200, 404


@contextlib.contextmanager
def local_rendezvous(
    place: Mapping[str, int], rendezvous: tuple[str, int], token: str = ""
) -> Iterator[tuple[str, int]]:
    """In the block, answers Horovod at the address and port that it yields.

    Horovod asks for the addresses of all connections of each other rank: of N ranks, for N² values of N addresses. A
    server for 1,024 ranks would answer for half an hour.

    Args:
        place: see :func:`~hvdtrain.system.environment.set_place`.
        rendezvous: the address and port of the job's :class:`~hvdtrain.distributed.rendezvous.Rendezvous`.
        token: that of the rendezvous, which Horovod has to send here too.
    """
    answers = _Answers(place, rendezvous, token)
    server = KeyValueServer(_HOST, answers.get, answers.put, token)
    server.start()
    try:
        yield _HOST, server.port
    finally:
        server.close()


class _Answers:
    def __init__(self, place: Mapping[str, int], rendezvous: tuple[str, int], token: str):
        self._places = {
            "global": (place["rank"], place["size"]),
            "local": (place["local_rank"], place["local_size"]),
            "cross": (place["cross_rank"], place["cross_size"]),
        }
        self._rendezvous = rendezvous
        self._headers = authorization(token)
        self._lock = threading.Lock()
        self._gathered: dict[tuple[str, str], bytes] = {}
        self._is_lost = False
        """Whether the rendezvous lacks a value of this rank."""

    def put(self, scope: str, key: str, value: bytes) -> None:
        # A busy rendezvous may stop reading a request.
        self._is_lost |= not any(self._request("PUT", scope, key, value)[0] == _OK for _ in range(_ATTEMPTS))

    def get(self, scope: str, key: str) -> bytes | None:
        """What Horovod expects; an empty answer, which ends the start, if the rendezvous is lost or has ended."""
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
        if self._is_lost:
            return b""
        with self._lock:
            if (scope, key) not in self._gathered:
                status, answer = self._request("GET", scope, key)
                if status == _NOT_FOUND:
                    return None
                self._gathered[scope, key] = answer if status == _OK else b""
            return self._gathered[scope, key]

    def _request(self, method: str, scope: str, key: str, value: bytes | None = None) -> tuple[int | None, bytes]:
        """The status and the content of the answer; None if there is none."""
        connection = http.client.HTTPConnection(*self._rendezvous, timeout=_TIMEOUT_S)
        try:
            connection.request(method, f"/{scope}/{key}", value, self._headers)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException):
            return None, b""
        finally:
            connection.close()
