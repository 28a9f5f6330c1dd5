"""TFRecord files, intact and damaged, read as one of several ranks."""

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.data import TFRecords, evaluation_dataset, record_index, training_dataset
from hvdtrain.data.record_files import RecordFile, find_files
from hvdtrain.data.record_index import RecordIndex
from hvdtrain.data.record_table import RecordTable, open_table
from hvdtrain.data.sample_plan import SamplePlan
from hvdtrain.distributed.single_process import SingleProcessCollectives
from hvdtrain.errors import DataError, JobError, UsageError

FEATURES = {"x": tf.io.FixedLenFeature([2], tf.int64), "y": tf.io.FixedLenFeature([], tf.int64)}


def parse(serialized):
    features = tf.io.parse_single_example(serialized, FEATURES)
    return features["x"], features["y"]


def example(number: int, label: tf.train.Feature | None = None) -> bytes:
    def integers(*values: int) -> tf.train.Feature:
        return tf.train.Feature(int64_list=tf.train.Int64List(value=values))

    # Lengths differ, so that no offset is correct by chance.
    features = {"x": integers(number, 1), "y": label or integers(number % 3), "z": integers(*range(number % 5))}
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def write(path: Path, records: list[bytes], compression: str = "") -> Path:
    with tf.io.TFRecordWriter(str(path), compression) as writer:
        for record in records:
            writer.write(record)
    return path


@pytest.fixture
def folder(tmp_path) -> Path:
    """Samples 0 to 29 in files of 10; the second is a GZIP file."""
    for file in range(3):
        records = [example(number) for number in range(10 * file, 10 * file + 10)]
        write(tmp_path / f"{file}.tfrecord", records, "GZIP" if file == 1 else "")
    return tmp_path


@pytest.fixture
def whole(tmp_path) -> Path:
    """One file of 10 records."""
    return write(tmp_path / "whole.tfrecord", [example(number) for number in range(10)])


def open_files(files, **options) -> TFRecords:
    first = Path(files[0] if isinstance(files, list) else files)
    return TFRecords(files, options.pop("parse", parse), **{"cache_dir": first.parent / "cache", **options})


def indexed(path: Path) -> tuple[list[RecordFile], RecordTable]:
    """The files and the table of an only rank."""
    files = find_files([path], path.parent / "cache", SingleProcessCollectives())
    return files, open_table(files, SingleProcessCollectives())


def drawn(source, plan: SamplePlan, micro_batches: int, **options) -> list[tuple[list[int], float]]:
    dataset = training_dataset(source, plan, **options).take(micro_batches)
    return [(data[0][:, 0].tolist(), float(factor)) for data, factor in dataset.as_numpy_iterator()]


def become_second_rank(monkeypatch, gathered_from_rank_0: list) -> None:
    """Makes this process rank 1 of 2 on a host; rank 0 contributes these values to successive allgathers.

    Rank 0 never fails: it contributes 0 to sums.
    """
    from_rank_0 = iter(gathered_from_rank_0)

    class SecondRank(SingleProcessCollectives):
        size, local_rank, local_size = 2, 1, 2

        def __init__(self):
            super().__init__(rank=1)

        def allgather(self, value):
            return [next(from_rank_0), value]

    monkeypatch.setattr("hvdtrain.distributed.runtime.collectives", SecondRank)


def offset_of(path: Path, record: int) -> int:
    return int(record_index.index_records(path).offsets[record])


def change_byte(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0xFF
    path.write_bytes(data)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_each_sample_once_over_ranks(folder, size):
    source = open_files(folder / "*.tfrecord")
    assert (source.num_samples, list(source.bad_samples)) == (30, [])
    everything = []
    for rank in range(size):
        plan = SamplePlan(num_samples=30, batch_size=4, rank=rank, size=size)
        batches = drawn(source, plan, plan.steps_per_epoch)
        assert [numbers for numbers, _ in batches] == [plan.numbers(i).tolist() for i in range(plan.steps_per_epoch)]
        everything += [n for numbers, factor in batches if factor for n in numbers]
    assert sorted(everything) == list(range(30))
    shares = [evaluation_dataset(source, 4, rank, size) for rank in range(size)]
    assert [n for share in shares for x, _ in share.as_numpy_iterator() for n in x[:, 0]] == list(range(30))


def test_starting_later_equals_skipping(folder):
    source = open_files(folder / "*.tfrecord")
    plan = SamplePlan(num_samples=30, batch_size=4, rank=1, size=2)
    assert drawn(source, plan, 3, first_micro_batch=6) == drawn(source, plan, 9)[6:]


def test_augmentation_does_not_depend_on_the_number_of_ranks(folder):
    def augment(x, y, seed):
        return x + tf.random.stateless_uniform([2], seed, 0, 1_000_000, tf.int64) * 1000, y

    source = open_files(folder / "*.tfrecord", augment=augment)

    def epoch(size: int) -> list[int]:
        plans = [SamplePlan(num_samples=30, batch_size=30 // size, rank=rank, size=size) for rank in range(size)]
        return sorted(n for plan in plans for numbers, _ in drawn(source, plan, 1) for n in numbers)

    assert epoch(1) == epoch(3)
    assert sorted(n % 1000 for n in epoch(1)) == list(range(30))
    assert max(epoch(1)) > 1000


def parse_batch(serialized):
    features = tf.io.parse_example(serialized, FEATURES)
    if tf.size(serialized) == 0:  # Never true; shows that parse may branch on tensors.
        features["x"] -= 1
    return features["x"], features["y"]


def test_batched_parse_equals_parse(folder):
    plan = SamplePlan(num_samples=30, batch_size=4, seed=1)

    def augment(x, y, seed):
        return x + tf.random.stateless_uniform([2], seed, maxval=100, dtype=tf.int64), y

    for options in ({}, {"augment": augment}):
        singly = open_files(str(folder / "*.tfrecord"), **options)
        at_once = open_files(str(folder / "*.tfrecord"), parse=parse_batch, batched=True, **options)
        for ours, theirs in zip(training_dataset(at_once, plan).take(9), training_dataset(singly, plan), strict=False):
            for mine, other in zip(tf.nest.flatten(ours), tf.nest.flatten(theirs), strict=True):
                assert np.array_equal(mine, other)
    place = folder / "0.tfrecord"
    change_byte(place, offset_of(place, 3) + 14)
    assert [bad.number for bad in at_once.find_bad(np.arange(5))] == [3]


def test_sample_weights_and_invalid_results(whole):
    source = open_files(whole, parse=lambda s: (*parse(s), 0.5))
    data, _ = next(iter(training_dataset(source, SamplePlan(num_samples=10, batch_size=5))))
    assert data[2].numpy().tolist() == [0.5] * 5
    with pytest.raises(UsageError, match="parse must return"):
        open_files(whole, parse=lambda s: s)


def test_files_are_found_by_path_pattern_and_list(folder):
    paths = [folder / "2.tfrecord", folder / "0.tfrecord"]
    source = open_files([*paths, str(folder / "0*")])
    plan = SamplePlan(num_samples=20, batch_size=20, shuffle=False)
    assert drawn(source, plan, 1)[0][0] == [*range(10), *range(20, 30)]
    with pytest.raises(JobError, match=r"nothing\*.*matches none") as caught:
        open_files(folder / "nothing*")
    assert caught.value.exit_code == 65


def test_index_is_cached_until_the_file_changes(folder, monkeypatch):
    scanned = []

    def index_records(path: Path) -> RecordIndex:
        scanned.append(path)
        return walk(path)

    walk = record_index.index_records
    monkeypatch.setattr(record_index, "index_records", index_records)
    facts = open_files(folder / "*.tfrecord").facts()
    assert len(scanned) == 3
    assert open_files(folder / "*.tfrecord").facts() == facts
    assert len(scanned) == 3
    write(folder / "0.tfrecord", [example(number) for number in range(7)])
    changed = open_files(folder / "*.tfrecord")
    assert scanned[3:] == [folder / "0.tfrecord"]
    assert changed.num_samples == 27
    assert changed.facts() != facts
    os.utime(folder / "2.tfrecord", ns=(0, 0))
    open_files(folder / "*.tfrecord")
    assert scanned[4:] == [folder / "2.tfrecord"]
    for entry in (folder / "cache" / "index").iterdir():
        entry.write_bytes(entry.read_bytes()[:100])
    assert open_files(folder / "*.tfrecord").num_samples == 27


def test_changed_gzip_file_is_unpacked_again(folder):
    path = folder / "1.tfrecord"
    assert open_files(path).num_samples == 10
    (before,) = (folder / "cache" / "unpacked").iterdir()
    written_ns = before.stat().st_mtime_ns
    open_files(path)
    assert before.stat().st_mtime_ns == written_ns
    write(path, [example(number) for number in range(3)], "GZIP")
    assert open_files(path).num_samples == 3
    (after,) = (folder / "cache" / "unpacked").iterdir()
    assert after != before


def test_unwritable_cache(folder):
    """A file takes the folder's place, so that not even root can write there."""
    no_folder = folder / "file"
    no_folder.write_text("")
    assert open_files(folder / "0.tfrecord", cache_dir=no_folder).num_samples == 10
    with pytest.raises(JobError, match=r"1\.tfrecord.*cache_dir") as caught:
        open_files(folder / "1.tfrecord", cache_dir=no_folder)
    assert caught.value.exit_code == 65


@pytest.mark.parametrize("left_bytes", [5, 14])
def test_truncated_last_record(whole, left_bytes):
    start = offset_of(whole, 9)
    os.truncate(whole, start + left_bytes)
    source = open_files(whole)
    assert source.num_samples == 9
    (bad,) = source.bad_samples
    assert (bad.number, bad.where) == (-1, f"{whole}, record 9 at offset {start} bytes")
    assert "truncated" in bad.cause
    assert f"{left_bytes} " in bad.cause


def test_corrupt_length(whole):
    start, end = offset_of(whole, 4), whole.stat().st_size
    change_byte(whole, start)
    for source in (open_files(whole), open_files(whole)):  # scanned, and from the cache
        assert source.num_samples == 4
        (bad,) = source.bad_samples
        assert bad.where == f"{whole}, record 4 at offset {start} bytes"
        assert bad.cause == f"wrong checksum of a record's length: {end - start} bytes cannot be read"


def test_corrupt_data_fails_only_its_batch(whole):
    start = offset_of(whole, 6)
    change_byte(whole, start + 12)
    source = open_files(whole)
    assert not source.bad_samples
    plan = SamplePlan(num_samples=10, batch_size=2, shuffle=False)
    iterator = iter(training_dataset(source, plan))
    for _ in range(3):
        next(iterator)
    with pytest.raises(tf.errors.OpError, match=f"record 6 at offset {start} bytes: wrong data checksum"):
        next(iterator)
    (bad,) = source.find_bad(plan.numbers(3))
    assert (bad.number, bad.where, bad.cause) == (
        6,
        f"{whole}, record 6 at offset {start} bytes",
        "wrong data checksum",
    )
    after = drawn(source, plan, 7, first_micro_batch=3, excluded=frozenset({bad.number}))
    assert after == [([7], 0.5), ([8, 9], 1.0), ([0, 1], 1.0), ([2, 3], 1.0), ([4, 5], 1.0), ([7], 0.5), ([8, 9], 1.0)]
    evaluation = evaluation_dataset(source, 4, 0, 1, first_batch=1, excluded=frozenset({6}))
    assert [x[:, 0].tolist() for x, _ in evaluation.as_numpy_iterator()] == [[4, 5, 7], [8, 9]]


def test_feature_of_another_type(tmp_path):
    text = tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"one"]))
    first = write(tmp_path / "0.tfrecord", [example(number) for number in range(4)])
    second = write(tmp_path / "1.tfrecord", [example(4), example(5, text)])
    source = open_files([first, second])
    with pytest.raises(tf.errors.OpError, match="Data types don't match"):
        drawn(source, SamplePlan(num_samples=6, batch_size=3), 2)
    (bad,) = source.find_bad(np.arange(6))
    assert (bad.number, bad.where) == (5, f"{second}, record 1 at offset {offset_of(second, 1)} bytes")
    assert bad.cause == "Key: y. Data types don't match. Data type: string but expected type: int64"


def test_record_of_another_shape(whole):
    def two_bytes(serialized):
        return tf.reshape(tf.io.decode_raw(serialized, tf.uint8), [2]), 0

    source = open_files(write(whole, [b"ab", b"abc"]), parse=two_bytes)
    with pytest.raises(tf.errors.OpError):
        next(iter(training_dataset(source, SamplePlan(num_samples=2, batch_size=2))))
    (bad,) = source.find_bad(np.arange(2))
    assert (bad.number, bad.cause) == (
        1,
        "Input to reshape is a tensor with 3 values, but the requested shape has 2",
    )


@pytest.mark.parametrize("damage", ["cut", "corrupt", "found late"])
def test_damaged_gzip_file_is_used_up_to_the_damage(tmp_path, damage):
    random = np.random.default_rng(0)
    # Random, so that the middle of the file is the middle of the records. Incompressible data is stored
    # uncompressed; damage to it is detected only by the checksum at the end of the file.
    largest = 255 if damage == "found late" else 15
    records = [random.integers(0, largest, 1000, np.uint8, endpoint=True).tobytes() for _ in range(100)]
    path = write(tmp_path / "a.tfrecord.gz", records, "GZIP")
    middle = path.stat().st_size // 2
    data = path.read_bytes()
    changed = {
        "cut": b"",
        "corrupt": bytes([255] * 200) + data[middle + 200 :],
        "found late": bytes(1500) + data[middle + 1500 :],
    }
    path.write_bytes(data[:middle] + changed[damage])
    for _ in range(2):
        source = open_files(path, parse=lambda s: (s, 0))
        assert 40 < source.num_samples < 60
        (bad,) = source.bad_samples
        offset = source.num_samples * 1016
        assert bad.where == f"{path}, record {source.num_samples} at offset {offset} bytes of the unpacked data"
        assert "GZIP data is damaged" in bad.cause
        assert not source.find_bad(np.arange(source.num_samples))


def test_concatenated_gzip_members(tmp_path):
    parts = [write(tmp_path / f"{i}", [example(i)], "GZIP") for i in range(3)]
    joined = tmp_path / "joined.tfrecord"
    joined.write_bytes(b"".join(part.read_bytes() for part in parts) + bytes(512))
    source = open_files(joined)
    assert drawn(source, SamplePlan(num_samples=3, batch_size=3, shuffle=False), 1) == [([0, 1, 2], 1.0)]
    assert not source.bad_samples


def test_plain_file_that_starts_like_a_gzip_file(tmp_path):
    path = write(tmp_path / "a.tfrecord", [bytes(0x088B1F)])
    assert path.read_bytes()[:3] == b"\x1f\x8b\x08"
    assert open_files(path, parse=lambda s: (s, 0)).num_samples == 1


def test_empty_files(whole):
    empty = whole.with_name("empty.tfrecord")
    empty.write_bytes(b"")
    source = open_files([whole, empty])
    assert source.num_samples == 10
    (bad,) = source.bad_samples
    assert bad.where.startswith(f"{empty},")
    assert bad.cause == "the file is empty"
    with pytest.raises(JobError, match=r"at least one record.*empty\.tfrecord.*the file is empty") as caught:
        open_files(empty)
    assert caught.value.exit_code == 65
    with pytest.raises(JobError, match=r"at least one record.*packed\.tfrecord"):
        open_files(write(whole.with_name("packed.tfrecord"), [], "GZIP"))


def test_file_that_changes_while_it_is_read(folder):
    source = open_files(folder / "*.tfrecord")
    source.check_unchanged()
    size = (folder / "2.tfrecord").stat().st_size
    with open(folder / "2.tfrecord", "ab") as file:
        file.write(b"more")
    with pytest.raises(DataError, match=rf"2\.tfrecord, which had {size} bytes and now has {size + 4}"):
        source.check_unchanged()
    (folder / "2.tfrecord").unlink()
    with pytest.raises(DataError, match=r"2\.tfrecord"):
        source.check_unchanged()


def test_file_that_shrinks_while_it_is_read(whole):
    source = open_files(whole)
    os.truncate(whole, offset_of(whole, 8) + 20)
    assert [(bad.number, bad.cause.split(":")[0]) for bad in source.find_bad(np.arange(7, 10))] == [
        (8, "the record is truncated"),
        (9, "the record is truncated"),
    ]


def test_all_ranks_must_find_the_files_of_rank_0(folder, monkeypatch):
    """Rank 0 has indexed a file that is one byte longer."""
    files, table = indexed(folder / "0.tfrecord")
    size = int(table.files.sizes[0])
    longer = dataclasses.replace(table.files, sizes=np.array([size + 1]))
    # What rank 0 contributes: its files, its table, and no error.
    become_second_rank(monkeypatch, [files, RecordTable(longer, table.offsets), None])
    with pytest.raises(JobError, match=rf"{size} bytes on this rank, {size + 1} on rank 0"):
        open_files(folder / "0.tfrecord")


def test_only_rank_0_scans_the_files(folder, monkeypatch):
    become_second_rank(monkeypatch, list(indexed(folder / "0.tfrecord")))
    monkeypatch.setattr(record_index, "index_records", None)
    assert open_files(folder / "0.tfrecord").num_samples == 10


def test_more_files_than_may_be_open_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("hvdtrain.data.tfrecords._MAX_OPEN_FILES", 2)
    files = [write(tmp_path / f"{i:02}", [example(2 * i), example(2 * i + 1)]) for i in range(8)]
    source = open_files(files)
    before = len(os.listdir("/proc/self/fd"))
    plan = SamplePlan(num_samples=16, batch_size=4)
    assert sorted(n for numbers, _ in drawn(source, plan, 4) for n in numbers) == list(range(16))
    assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_a_file_name_may_contain_brackets(folder):
    path = folder / "part[0].tfrecord"
    (folder / "0.tfrecord").rename(path)
    plan = SamplePlan(num_samples=10, batch_size=10, shuffle=False)
    assert drawn(open_files(path), plan, 1)[0][0] == [*range(10)]
