"""Data files of an object store: downloaded once, validated, complete or absent."""

import json
import os
import subprocess
import sys

import pytest
import tensorflow as tf
from fsspec.implementations.memory import MemoryFileSystem

from hvdtrain.data import ImageFolder, Table, TFRecords, downloads, fetch
from hvdtrain.errors import JobError, StoreError, UsageError
from hvdtrain.stores.store import Store
from hvdtrain.stores.urls import is_url, local_path


@pytest.fixture
def downloaded(monkeypatch):
    """The names of the files that were downloaded, in any order."""
    names = []
    download = Store.download

    def counted(self, name, path):
        names.append(name)
        download(self, name, path)

    monkeypatch.setattr(Store, "download", counted)
    return names


def files_in(folder) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def check_that_what_differs_is_downloaded(url, cache, downloaded, capfd):
    store = Store(url)
    content = {"a.bin": b"1", "nested/b.bin": b"22", "nested/empty": b""}
    for name, each in content.items():
        store.write(name, each)
    folder = fetch(url)
    assert files_in(folder) == content
    assert sorted(downloaded) == sorted(content)
    downloaded.clear()
    assert fetch(url) == folder
    assert downloaded == []
    store.write("a.bin", b"3")  # of the same size
    (folder / "nested" / "b.bin").write_bytes(b"damaged")
    store.delete("nested/empty")
    assert files_in(fetch(url)) == {"a.bin": b"3", "nested/b.bin": b"22"}
    assert sorted(downloaded) == ["a.bin", "nested/b.bin"]
    file = fetch(f"{url}/nested/b.bin")
    assert file.read_bytes() == b"22"
    assert file.name == "b.bin"
    assert fetch(folder) == folder
    with pytest.raises(JobError, match=f"there must be data. Received: {url}/nothing, which is neither"):
        fetch(f"{url}/nothing")


def test_what_differs_is_downloaded(url, cache, downloaded, capfd):
    check_that_what_differs_is_downloaded(url, cache, downloaded, capfd)


@pytest.mark.slow
def test_what_differs_is_downloaded_from_s3(s3_url, cache, downloaded, capfd):
    check_that_what_differs_is_downloaded(s3_url, cache, downloaded, capfd)


def test_an_interrupted_download_leaves_no_file(url, cache, monkeypatch):
    Store(url).write("train.bin", b"123456")

    def interrupted(self, name, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"123")
        raise StoreError("connection lost")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "download", interrupted)
        with pytest.raises(JobError, match=r"HVDTRAIN_STORE_CACHE=/path sets another folder") as caught:
            fetch(url)
    assert caught.value.exit_code == 65
    assert not files_in(cache("cache"))

    def too_short(self, name, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"123")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "download", too_short)
        with pytest.raises(JobError, match=r"train.bin must have 6 bytes. Received: 3"):
            fetch(url)
    assert not files_in(cache("cache") / "data")
    assert files_in(fetch(url)) == {"train.bin": b"123456"}


def test_names_cannot_lead_out_of_the_folder(url, cache, monkeypatch):
    with pytest.raises(UsageError, match="must have the form memory://bucket/path"):
        local_path("data", "memory://bucket/../../etc")
    found = {f"/bucket/folder/{name}": {"size": 1} for name in ("inside", "../outside")}
    monkeypatch.setattr(MemoryFileSystem, "find", lambda *_, **__: found)
    with pytest.raises(StoreError, match=r"folder/\.\./outside cannot be the name of a local file"):
        Store(url).files()


def test_tfrecords_of_a_pattern_are_indexed_beside_their_copies(url, cache, tmp_path, downloaded):
    def parse(records):
        x = tf.io.parse_example(records, {"x": tf.io.FixedLenFeature([1], tf.float32)})["x"]
        return x, 2 * x

    for number in range(3):
        path = tmp_path / f"train-{number}.tfrecord"
        with tf.io.TFRecordWriter(str(path), "GZIP" if number == 1 else None) as file:
            feature = tf.train.Feature(float_list=tf.train.FloatList(value=[number]))
            file.write(tf.train.Example(features=tf.train.Features(feature={"x": feature})).SerializeToString())
        Store(url).upload(path, path.name)
    Store(url).write("test-0.tfrecord", b"")
    pattern = f"{url}/train-[0-9].tfrecord"
    assert TFRecords(pattern, parse, batched=True).num_samples == 3
    folder = cache("cache")
    assert {each.name for each in folder.iterdir()} == {"data", "index", "partial", "unpacked", "versions"}
    assert len(list((folder / "index").iterdir())) == 3
    Store(url).delete("train-2.tfrecord")
    assert TFRecords([pattern, f"{url}/train-0.tfrecord"], parse, batched=True).num_samples == 2
    assert sorted(downloaded) == ["train-0.tfrecord", "train-1.tfrecord", "train-2.tfrecord"]


def test_one_rank_of_a_host_downloads(url, cache, downloaded):
    class Ranks:
        """Of rank 1: local rank 0 has downloaded already."""

        rank, local_rank, size = 1, 1, 2

        def sum(self, arrays):
            return list(arrays)

        def allgather(self, value):
            return [None, value]

    Store(url).write("a", b"1")
    with pytest.raises(JobError, match=f"must use the same data and the same file system. Received: {url}"):
        downloads.local_copies([url], Ranks())
    assert downloaded == []
    fetch(url)
    assert downloads.local_copies([url], Ranks()) == [local_path("data", url)]
    assert downloaded == ["a"]


def test_other_sources_name_fetch():
    for source in (lambda: ImageFolder("s3://b/images"), lambda: Table("s3://b/rows.csv", x="x")):
        with pytest.raises(
            UsageError, match=r"must be local. Received: 's3://b/.*'. Use hvdtrain.data.fetch\('s3://b/"
        ):
            source()


def test_a_url_is_a_string(tmp_path):
    assert is_url("s3://bucket")
    assert not is_url("s3:/bucket")
    assert not is_url(tmp_path)
    with pytest.raises(UsageError, match=r"a URL must be a string, not a pathlib.Path. Received: PosixPath\('s3:/buc"):
        is_url(type(tmp_path)("s3://bucket/run"))


WITHOUT_PACKAGES = """
import json, sys
from hvdtrain.commands import cli
for missing, arguments in json.loads(sys.argv[1]):
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in ("fsspec", "s3fs")}
    sys.modules[missing] = None
    print(cli.main(arguments), flush=True)
    del sys.modules[missing]
assert "tensorflow" not in sys.modules
"""


def test_missing_packages_are_refused_in_one_line():
    cases = [
        (
            "fsspec",
            ["--run-dir", "s3://b/run"],
            "--run-dir s3://… needs packages that are not installed. Received: ",
        ),
        ("s3fs", ["--data-dir", "s3://b/data"], "Install them: HVDTRAIN_EXTRAS=stores launch/run …, or pip install '"),
        ("gcsfs", ["eval", "--run-dir", "gs://b/run"], "--run-dir gs://… needs packages that are not installed"),
        ("none", ["--resume", "s4://b/run"], "--resume must be a path, or a URL with a protocol that fsspec knows"),
        ("none", ["export", "--output", "s3://"], "--output must have the form s3://bucket/path. Received: 's3://'"),
        ("fsspec", ["compare", "s3://b/run"], "RUN s3://… needs packages that are not installed"),
    ]
    command = [sys.executable, "-c", WITHOUT_PACKAGES, json.dumps([each[:2] for each in cases])]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "HOROVOD_"))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["64"] * len(cases)
    for line, (*_, message) in zip(done.stderr.splitlines(), cases, strict=True):
        assert message in line
