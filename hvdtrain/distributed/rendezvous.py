"""Where the ranks of a job over Gloo find each other's addresses. Does not import TensorFlow."""

import threading


class Rendezvous:
    """Horovod's key-value store, served by this process.

    Args:
        host: the address to listen on.
    """

    def __init__(self, host: str):
        from horovod.runner.http import http_server  # not above: most processes need none

        self._server = http_server.RendezvousHTTPServer((host, 0), http_server.RendezvousHandler, 0)
        # A rank that has died may have left a request half sent.
        self._server.daemon_threads, self._server.block_on_close = True, False
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stops serving: ranks that still wait for others fail to start."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
