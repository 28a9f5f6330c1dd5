"""Files that a stranger has made too large to be read into memory."""

import json

import pytest

from hvdtrain.checkpoint import storage
from hvdtrain.checkpoint.rank_file import RankFileReader
from hvdtrain.commands.trained_run import has_ended
from hvdtrain.errors import StoreError
from hvdtrain.runs.run_record import read_run
from hvdtrain.stores.store import Store
from hvdtrain.system import bounded_files, json_files

TERABYTE = 1 << 40


@pytest.fixture
def huge(tmp_path):
    """A sparse file of 1 TB in a folder that is named as a checkpoint."""
    path = tmp_path / "step-0000000001" / "huge"
    path.parent.mkdir()
    with path.open("wb") as file:
        file.truncate(TERABYTE)
    return path


def test_a_json_object(huge):
    with pytest.raises(OSError, match="at most 64 MiB"):
        json_files.read_object(huge)
    assert not has_ended(huge, 1)


def test_lines(huge):
    with pytest.raises(OSError, match="at most 4096 MiB"):
        json_files.read_lines(huge)


def test_a_long_line_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(bounded_files, "MAX_BYTES", 1 << 20)
    path = tmp_path / "metrics.jsonl"
    long = json.dumps({"text": "x" * 3_000_000})
    path.write_text('{"step": 1}\n' + long + '\n{"step": 2}\n{"cut')
    assert json_files.read_lines(path) == [{"step": 1}, {"step": 2}]
    # The longest that is read, and one byte more.
    for more, expected in ((0, 1), (1, 0)):
        line = b'{"text": "' + b"x" * ((1 << 20) - 13 + more) + b'"}\n'
        path.write_bytes(line)
        assert len(list(bounded_files.read_lines(path))) == expected, len(line)


def test_checksums_of_a_checkpoint(huge):
    for name in (storage.MANIFEST, storage.RANKS, f"{storage.TENSORS}.index"):
        (huge.parent / name).touch()
    huge.rename(huge.with_name(storage.SUMS))
    assert "at most 64 MiB" in storage.damage(huge.parent)


def test_the_header_of_a_rank_file(huge):
    with huge.open("r+b") as file:
        file.write((TERABYTE >> 1).to_bytes(8, "little"))
    with pytest.raises(ValueError, match="or than 64 MiB"):
        RankFileReader(huge, 1)


def test_a_file_of_an_object_store(huge):
    store = Store(huge.parent.as_uri())
    with pytest.raises(StoreError, match=r"huge must have at most 64 MiB"):
        store.read(huge.name)
    (huge.parent / "empty").touch()
    assert store.read("empty") == b""
    assert store.read("missing") is None


def test_a_log_in_an_object_store_may_be_longer_than_what_is_read_into_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("hvdtrain.stores.store.MAX_BYTES", 10)
    (tmp_path / "metrics.jsonl").write_text('{"event": "train", "step": 1, "loss": 2.0}\n')
    assert read_run(tmp_path.as_uri()).points("train", "loss") == [[2.0]]
    monkeypatch.setattr("hvdtrain.runs.run_files.MAX_LINES_BYTES", 10)
    with pytest.raises(StoreError, match=r"metrics\.jsonl must have at most"):
        read_run(tmp_path.as_uri())
