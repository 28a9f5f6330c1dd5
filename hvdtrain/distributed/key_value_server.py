"""The server in which the ranks of a job over Gloo look for values, as Horovod asks for them. Does not import
TensorFlow."""

import socket
import sys
import threading
from collections.abc import Callable


def authorization(token: str) -> dict[str, str]:
    """The header of a request to a server with a token."""
    return {"Authorization": f"Bearer {token}"}


class KeyValueServer:
    """Listens at once, and answers from :meth:`start` on.

    Args:
        host: the address to listen on.
        get: returns the value of a key in a scope; None if there is none yet, so that Horovod asks again.
        put: receives the value of a key in a scope.
        token: requests without it are refused; empty: all are answered.
    """

    def __init__(
        self,
        host: str,
        get: Callable[[str, str], bytes | None],
        put: Callable[[str, str, bytes], None],
        token: str = "",
    ):
        from horovod.runner.http import http_server  # not above: most processes need none

        class Handler(http_server.KVStoreHandler):
            def _get_value(self, scope: str, key: str) -> bytes | None:
                return get(scope, key)

            def _put_value(self, scope: str, key: str, value: bytes) -> None:
                put(scope, key, value)

            def do_DELETE(self) -> None:
                # A rank that has connected to all others; some of them may not have asked for its values yet.
                self.send_status_code(http_server.OK)

        Handler.token = token

        class Server(http_server.RendezvousHTTPServer):
            # All ranks connect at the same time; those that find the queue full (5 by default) wait for a second.
            request_queue_size = 1024
            # A rank that has died may have left a request half sent.
            daemon_threads, block_on_close = True, False

            def handle_error(self, request: object, client_address: object) -> None:
                # Whoever has asked is lost, or its connections are cut: it needs no answer.
                if not isinstance(sys.exc_info()[1], OSError):
                    super().handle_error(request, client_address)

        self._server = Server((host, 0), Handler, 0)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    def start(self) -> None:
        """Starts to answer requests, including those already received."""
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stops serving."""
        if self._thread.is_alive():
            # Wakes the thread, which otherwise looks only at its next poll: ranks that change wait for it.
            self._server.socket.shutdown(socket.SHUT_RDWR)
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()
