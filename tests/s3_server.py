"""An S3 server on this machine, for the tests of object stores; it runs in the test's process."""

import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def s3_server() -> Iterator[str]:
    """Starts moto's server on a free port and sets the variables by which clients find it; yields a bucket's URL."""
    import s3fs
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {
                "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.get_host_and_port()[1]}",
                "AWS_ACCESS_KEY_ID": "test",
                "AWS_SECRET_ACCESS_KEY": "test",
                "AWS_DEFAULT_REGION": "us-east-1",
                "AWS_EC2_METADATA_DISABLED": "true",
                "NO_PROXY": "127.0.0.1",
            }.items():
                patch.setenv(name, value)
            # Instances are kept by fsspec, with the address of an earlier server.
            s3fs.S3FileSystem.clear_instance_cache()
            # Another one for each server: moto keeps them for the whole process.
            bucket = f"bucket-{uuid.uuid4().hex}"
            s3fs.S3FileSystem().mkdir(bucket)
            yield f"s3://{bucket}"
    finally:
        server.stop()
        s3fs.S3FileSystem.clear_instance_cache()
