"""Where the ranks of a job over Gloo find each other's addresses. Does not import TensorFlow."""

import threading

_WAIT_S = 0.5


class Rendezvous:
    """Horovod's key-value store, served by this process: it listens at once, and answers from :meth:`start` on.

    Args:
        host: the address to listen on.
    """

    def __init__(self, host: str):
        from horovod.runner.http import http_server  # not above: most processes need none

        changed = self._changed = threading.Condition()
        is_over = self._is_over = threading.Event()

        class Handler(http_server.RendezvousHandler):
            def _get_value(self, scope: str, key: str) -> bytes | None:
                # Ranks that wait ask every 10 ms, which keeps this process busy if there are many of them.
                with changed:
                    changed.wait_for(lambda: is_over.is_set() or key in self.server.cache.get(scope, {}), _WAIT_S)
                return b"" if is_over.is_set() else super()._get_value(scope, key)

            def _put_value(self, scope: str, key: str, value: bytes) -> None:
                super()._put_value(scope, key, value)
                with changed:
                    changed.notify_all()

        class Server(http_server.RendezvousHTTPServer):
            # All ranks connect at the same time; those that find the queue full (5 by default) wait for a second.
            request_queue_size = 1024
            # A rank that has died may have left a request half sent.
            daemon_threads, block_on_close = True, False

        self._server = Server((host, 0), Handler, 0)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    def start(self) -> None:
        """Starts to answer requests, including those already received."""
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def fail(self) -> None:
        """Makes the start of ranks that still wait for others fail at once.

        Horovod would retry a closed server for another 1.5 s; an empty answer, which is not an address, ends the start.
        """
        self._is_over.set()
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Stops serving."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()
