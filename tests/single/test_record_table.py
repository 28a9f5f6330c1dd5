"""The records of data sets that are too many for the memory of each rank, and jobs too large to check all files."""

import glob
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from made_up_jobs import on_threads

from hvdtrain.data import record_files, record_index, record_table
from hvdtrain.data.record_files import find_files, to_check
from hvdtrain.data.record_table import RecordTable, open_table
from hvdtrain.errors import JobError

LOCAL_RANKS, LOCAL_SIZES, CROSS_RANKS = (0, 1, 0), (2, 2, 1), (0, 0, 1)
"""Of three ranks on two hosts."""


@pytest.fixture
def folder(tmp_path) -> Path:
    """Four files with 7 records each: plain, GZIP, empty, and truncated in its last record."""
    folder = tmp_path / "data"
    folder.mkdir()
    for name, kind in (("a", ""), ("b", "GZIP"), ("d", "")):
        with tf.io.TFRecordWriter(str(folder / name), kind) as writer:
            for i in range(7):
                writer.write(b"x" * (10 + i))
    (folder / "c").touch()
    (folder / "d").write_bytes((folder / "d").read_bytes()[:-3])
    return folder


def opened(folder: Path, caches: Path, hosts: str = "aab") -> list[Any]:
    """The table of each of three ranks, whose hosts have cache folders of their own, or the error."""

    def run(collectives: Any) -> RecordTable:
        rank = collectives.rank
        collectives.local_rank, collectives.local_size = LOCAL_RANKS[rank], LOCAL_SIZES[rank]
        collectives.cross_rank = CROSS_RANKS[rank]
        return open_table(find_files([folder / "*"], caches / hosts[collectives.rank], collectives), collectives)

    return on_threads(3, run)


def places(table: RecordTable) -> list[tuple[int, int, int]]:
    return [table.place_of(record) for record in range(table.files.num_records)]


def test_records_are_found_in_memory_and_in_a_file_alike(folder, tmp_path, monkeypatch):
    in_memory = opened(folder, tmp_path / "small")
    assert not (tmp_path / "small" / "a" / "records").exists()
    monkeypatch.setattr(record_table, "MAX_IN_MEMORY", 10)
    # So that a host receives several pieces.
    monkeypatch.setattr(record_table, "PIECE_RECORDS", 8)
    for hosts in ("aab", "aaa"):  # the second time, with a cache folder that hosts share
        for stored in tmp_path.glob("large/*/records/*"):
            stored.unlink()
        tables = opened(folder, tmp_path / "large", hosts)
        assert all(isinstance(table.offsets, np.memmap) for table in tables)
        for table in (*in_memory, *tables):
            assert places(table) == places(in_memory[0])
            assert table.files.damage == in_memory[0].files.damage
    # Each has 16 bytes around its data.
    expected = [
        (file, sum(26 + before for before in range(i)), 10 + i)
        for file, count in ((0, 7), (1, 7), (3, 6))
        for i in range(count)
    ]
    assert places(in_memory[0]) == expected
    assert in_memory[0].files.counts.tolist() == [7, 7, 0, 6]
    assert set(in_memory[0].files.damage) == {2, 3}


def test_files_are_scanned_again_only_if_one_has_changed(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(record_table, "MAX_IN_MEMORY", 10)
    expected = places(opened(folder, tmp_path)[0])
    scanned = []
    scan = record_table.cached_index
    monkeypatch.setattr(record_table, "cached_index", lambda *file: scanned.append(file) or scan(*file))
    assert [places(table) for table in opened(folder, tmp_path)] == [expected] * 3
    assert scanned == []
    # An incomplete file, as of a host whose disk was full.
    (stored,) = (tmp_path / "a" / "records").glob("*.offsets")
    stored.write_bytes(stored.read_bytes()[:-8])
    assert [places(table) for table in opened(folder, tmp_path)] == [expected] * 3
    assert len(scanned) == 4
    with tf.io.TFRecordWriter(str(folder / "a")) as writer:
        writer.write(b"another")
    tables = opened(folder, tmp_path)
    assert len(scanned) == 8
    assert [table.files.counts.tolist() for table in tables] == [[1, 7, 0, 6]] * 3


def test_the_ranks_of_a_host_divide_the_work(folder, tmp_path, monkeypatch):
    for name in "ef":
        with tf.io.TFRecordWriter(str(folder / name), "GZIP") as writer:
            writer.write(b"x")
    done: dict[str, list[tuple[int, str]]] = {"scanned": [], "unpacked": []}
    scan, unpack = record_index.index_records, record_files.unpack

    def noting(kind: str, action: Callable, *paths: Path) -> Any:
        done[kind].append((threading.get_ident(), str(paths[-1])))
        return action(*paths)

    monkeypatch.setattr(record_index, "index_records", lambda path: noting("scanned", scan, path))
    monkeypatch.setattr(record_files, "unpack", lambda *paths: noting("unpacked", unpack, *paths))
    tables = opened(folder, tmp_path)
    assert [places(table) for table in tables] == [places(tables[0])] * 3
    # Two ranks on the first host, which scans for all; the second unpacks for itself.
    assert sorted(Counter(thread for thread, _ in done["scanned"]).values()) == [3, 3]
    assert len({file for _, file in done["scanned"]}) == 6
    assert sorted(Counter(thread for thread, _ in done["unpacked"]).values()) == [1, 2, 3]
    assert len({file for _, file in done["unpacked"]}) == 6
    # As rank 0 alone would have found them.
    for each in done.values():
        each.clear()
    (alone,) = on_threads(1, lambda collectives: opened_alone(folder, tmp_path / "alone", collectives))
    assert places(alone) == places(tables[0])
    assert len(done["scanned"]) == 6


def opened_alone(folder: Path, cache: Path, collectives: Any) -> RecordTable:
    collectives.local_rank, collectives.local_size, collectives.cross_rank = 0, 1, 0
    return open_table(find_files([folder / "*"], cache, collectives), collectives)


@pytest.mark.parametrize("host", ["a", "b"])
def test_a_cache_folder_that_cannot_be_written_is_reported(folder, tmp_path, monkeypatch, host):
    monkeypatch.setattr(record_table, "MAX_IN_MEMORY", 10)
    (folder / "b").unlink()  # which would have to be unpacked there
    (folder / "a2").write_bytes((folder / "a").read_bytes())
    (tmp_path / host).touch()
    for error in opened(folder, tmp_path):
        assert isinstance(error, JobError), error
        assert "more than 10 records are kept in the cache folder, which must be writable" in str(error)


@pytest.mark.parametrize(("files", "size"), [(1, 1), (5, 4), (100_000, 4), (100_000, 4096), (3, 4096), (999_983, 64)])
def test_each_file_is_checked_by_a_rank(files, size):
    checked = np.zeros(files, np.int64)
    for rank in range(size):
        mine = to_check(files, rank, size)
        checked[mine.start : mine.stop] += 1
        assert len(mine) <= max(10**6 // size, -(-files // size))
        if files * size <= 10**6:
            assert len(mine) == files
    assert checked.min() > 0


def test_in_large_jobs_only_rank_0_looks_for_files(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(record_files, "MAX_CHECKS", 11)
    monkeypatch.setattr(record_table, "MAX_IN_MEMORY", 10)
    looked = []
    iglob = glob.iglob
    monkeypatch.setattr(glob, "iglob", lambda pattern: looked.append(pattern) or iglob(pattern))
    tables = opened(folder, tmp_path)
    assert looked == [str(folder / "*")]
    assert [places(table) for table in tables] == [places(tables[0])] * 3
    assert list((tmp_path / "b" / "unpacked").iterdir())
    assert list((tmp_path / "b" / "records").iterdir())


def test_packed_files_are_remembered(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(record_files, "MANY_FILES", 2)
    first = opened(folder, tmp_path)
    monkeypatch.setattr(record_files, "is_packed", None)
    assert [places(table) for table in opened(folder, tmp_path)] == [places(table) for table in first]
