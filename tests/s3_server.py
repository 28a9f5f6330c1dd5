"""An S3 server on this machine, for the tests of object stores; it runs in the test's process."""

import logging
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest


class S3Server:
    """Moto's server on a free port, with a bucket. Sets the variables by which clients find it."""

    def __init__(self) -> None:
        import s3fs
        from moto.server import ThreadedMotoServer

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        _, self._port = self._server.get_host_and_port()
        self._patch = pytest.MonkeyPatch()
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": "127.0.0.1",
        }.items():
            self._patch.setenv(name, value)
        # Instances are kept by fsspec, with the address of an earlier server.
        s3fs.S3FileSystem.clear_instance_cache()
        # Another one for each server: moto keeps them for the whole process.
        bucket = f"bucket-{uuid.uuid4().hex}"
        s3fs.S3FileSystem().mkdir(bucket)
        self.url = f"s3://{bucket}"

    def refuse_until(self, is_noticed: Callable[[], bool], most_s: float) -> bool:
        """Refuses connections until that has been noticed, or for so long; what is stored stays.

        Returns:
            Whether it was noticed.
        """
        from moto.server import ThreadedMotoServer

        self._server.stop()
        until_s = time.monotonic() + most_s
        while not (noticed := is_noticed()) and time.monotonic() < until_s:
            time.sleep(0.02)
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=self._port, verbose=False)
        self._server.start()
        return noticed

    def slow_for(self, seconds: float, delay_s: float) -> int:
        """Delays each answer for a time; returns how many were due."""
        plain = self._server._server.app
        delayed = []

        def slow(environ: Any, start_response: Any) -> Any:
            delayed.append(environ["PATH_INFO"])
            time.sleep(delay_s)
            return plain(environ, start_response)

        self._server._server.app = slow
        time.sleep(seconds)
        self._server._server.app = plain
        return len(delayed)

    def close(self) -> None:
        import s3fs

        self._patch.undo()
        self._server.stop()
        s3fs.S3FileSystem.clear_instance_cache()


@contextmanager
def s3_server() -> Iterator[str]:
    """Starts a server; yields its bucket's URL."""
    server = S3Server()
    try:
        yield server.url
    finally:
        server.close()
