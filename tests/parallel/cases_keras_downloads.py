"""On all ranks: what ``keras.utils.get_file`` downloads and extracts is whole, and each host downloads it once."""

import hashlib
import io
import os
import shutil
import tarfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import keras
import pytest
from models import SHARED_GPUS

import hvdtrain
from hvdtrain.distributed import runtime

TOPOLOGY = hvdtrain.init(seed=0, gpus=SHARED_GPUS)
RANK, SIZE = TOPOLOGY.rank, TOPOLOGY.size
COLLECTIVES = runtime.current().collectives
NUM_MEMBERS = 300


def archive() -> bytes:
    """Its folder has an old time, as in those of other people."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name in (".", "data"):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(folder)
        for i in range(NUM_MEMBERS):
            member = tarfile.TarInfo(f"data/{i}.txt")
            member.size = 1000
            tar.addfile(member, io.BytesIO(b"x" * member.size))
    return file.getvalue()


FILES = {"/data.bin": bytes(range(256)) * 1000, "/data.tar": archive()}


class SlowServer(ThreadingHTTPServer):
    """Sends each file in pieces, so that a rank would find a part of what another downloads."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[str] = []


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        content = FILES[self.path]
        self.server.requests.append(self.path)
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        for begin in range(0, len(content), len(content) // 10 + 1):
            self.wfile.write(content[begin : begin + len(content) // 10 + 1])
            time.sleep(0.05)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server():
    """Rank 0's."""
    found = SlowServer()
    threading.Thread(target=found.serve_forever, daemon=True).start()
    found.url = COLLECTIVES.allgather(f"http://127.0.0.1:{found.server_port}")[0]
    yield found
    COLLECTIVES.barrier()
    found.shutdown()
    found.server_close()


@pytest.fixture
def folder(tmp_path):
    """The same on all ranks, which are on one host."""
    path = Path(COLLECTIVES.allgather(str(tmp_path))[0])
    yield path
    COLLECTIVES.barrier()
    if RANK == 0:
        shutil.rmtree(path)


def downloaded(server, folder, name: str, **options) -> Path:
    """By ranks one of which begins while the other downloads."""
    COLLECTIVES.barrier()
    time.sleep(0.1 * RANK)
    found = keras.utils.get_file(name, f"{server.url}/{name}", cache_dir=folder, cache_subdir="files", **options)
    return Path(found)


@pytest.mark.parametrize("has_hash", [True, False])
def test_a_file_is_downloaded_once_and_whole(has_hash, server, folder):
    content = FILES["/data.bin"]
    options = {"file_hash": hashlib.sha256(content).hexdigest()} if has_hash else {}
    assert downloaded(server, folder, "data.bin", **options).read_bytes() == content
    COLLECTIVES.barrier()
    assert len(server.requests) == (RANK == 0)
    assert [each.name for each in (folder / "files").iterdir()] == ["data.bin"]


def test_what_an_earlier_job_has_downloaded_is_replaced_once(server, folder):
    if RANK == 0:
        (folder / "files").mkdir()
        path = folder / "files" / "data.bin"
        path.write_bytes(b"of another version")
        make_old(path)
    content = FILES["/data.bin"]
    digest = hashlib.sha256(content).hexdigest()
    assert downloaded(server, folder, "data.bin", file_hash=digest).read_bytes() == content
    COLLECTIVES.barrier()
    assert len(server.requests) == (RANK == 0)


def test_an_archive_is_extracted_once(server, folder):
    path = downloaded(server, folder, "data.tar", extract=True)
    assert_whole(path)
    # A rank that extracted it again would take away what another one reads.
    assert len(set(COLLECTIVES.allgather(path.stat().st_ino))) == 1
    COLLECTIVES.barrier()
    assert len(server.requests) == (RANK == 0)
    COLLECTIVES.barrier()
    if RANK == 0:
        (path / "data" / "0.txt").unlink()
        make_old(path)
    assert_whole(downloaded(server, folder, "data.tar", extract=True))
    assert sorted(each.name for each in (folder / "files").iterdir()) == ["data.tar", path.name]


def make_old(path: Path) -> None:
    """As if an earlier job had written it."""
    os.utime(path, (1, 1))


def assert_whole(path: Path) -> None:
    assert sum(each.stat().st_size for each in (path / "data").iterdir()) == 1000 * NUM_MEMBERS
