"""Serves the page of a report while its run goes on. Reads the run's files; the job knows nothing of it."""

import hashlib
import hmac
import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from hvdtrain.errors import DataError, UsageError
from hvdtrain.runs.report import page
from hvdtrain.runs.run_record import RunRecord

_READ_EVERY_S = 1.0
LOOPBACK = "127.0.0.1"


class LiveRuns:
    """The runs as their files are now, read at most once a second, however many browsers ask."""

    def __init__(self, read: Callable[[], list[RunRecord]]):
        self._read = read
        self._lock = threading.Lock()
        self._read_at_s = float("-inf")
        self._runs: list[RunRecord] = []
        self._values = b""
        self.version = ""

    def page(self) -> bytes:
        """The page, with the values as they are now."""
        with self._lock:
            self._refresh()
            return page.html(self._runs, is_live=True).encode()

    def values(self, known: str) -> bytes | None:
        """What :func:`page.values` returns, as JSON; None if it is still the version that the browser knows."""
        with self._lock:
            self._refresh()
            return None if known == self.version else self._values

    def _refresh(self) -> None:
        if time.monotonic() < self._read_at_s + _READ_EVERY_S:
            return
        try:
            runs = self._read()
        except DataError:
            if not self._runs:
                raise
            return  # It is being replaced, or the store does not answer: what was read last is shown.
        finally:
            self._read_at_s = time.monotonic()
        if runs != self._runs or not self._values:
            self._runs = runs
            found = page.values(runs)
            self.version = hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16]
            self._values = json.dumps({**found, "version": self.version}).encode()


def make_server(live: LiveRuns, address: str, port: int, token: str) -> ThreadingHTTPServer:
    """A server of the page at ``/TOKEN/``; ``port`` 0 is any free one.

    Other users of this host can connect, too, and pages of other sites that a browser has open: none knows the token.

    Raises:
        UsageError: it cannot listen there.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            _, received, name = [*url.path.split("/", 2), "", ""][:3]
            if not hmac.compare_digest(received.encode(), token.encode()):
                self._answer(404, b"", "text/plain")
            elif name == "":
                self._answer(200, live.page(), "text/html; charset=utf-8")
            elif name == "values.json":
                found = live.values(parse_qs(url.query).get("version", [""])[0])
                self._answer(204 if found is None else 200, found or b"", "application/json")
            else:
                self._answer(404, b"", "text/plain")

        def _answer(self, code: int, content: bytes, kind: str) -> None:
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            pass  # A browser that was closed.

    try:
        return Server((address, port), Handler)
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"--port must be free, and --address one of this host. Received: {address}:{port} ({error})"
        ) from error
