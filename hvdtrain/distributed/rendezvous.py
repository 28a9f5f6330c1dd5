"""Where the ranks of a job over Gloo find each other's addresses. Does not import TensorFlow."""

import threading


class Rendezvous:
    """Horovod's key-value store, served by this process.

    Args:
        host: the address to listen on.
    """

    def __init__(self, host: str):
        from horovod.runner.http import http_server  # not above: most processes need none

        over = self._is_over = threading.Event()

        class Handler(http_server.RendezvousHandler):
            def _get_value(self, scope: str, key: str) -> bytes | None:
                return b"" if over.is_set() else super()._get_value(scope, key)

        self._server = http_server.RendezvousHTTPServer((host, 0), Handler, 0)
        # A rank that has died may have left a request half sent.
        self._server.daemon_threads, self._server.block_on_close = True, False
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def fail(self) -> None:
        """Makes the start of ranks that still wait for others fail at once.

        Horovod would ask a server that is closed for another 1.5 s, but nothing is no address.
        """
        self._is_over.set()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
