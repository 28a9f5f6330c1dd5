"""Arrays that are moved between rank 0 and the other ranks in pieces, and the file that holds them."""

import gc
import json
import os
import resource
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from made_up_jobs import on_threads

from hvdtrain.checkpoint import draft, rank_states, transfer
from hvdtrain.checkpoint.draft import Draft
from hvdtrain.checkpoint.rank_file import RankFileReader, RankFileWriter
from hvdtrain.checkpoint.transfer import ArrayReader, ArrayWriter, specs_of
from hvdtrain.distributed import row_shards

DTYPES = [*(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)), "float16", "float32", "float64"]


def arrays_of(rank: int) -> dict[str, np.ndarray]:
    """Arrays of many dtypes and shapes; rank 1 has none."""
    if rank == 1:
        return {}
    rng = np.random.default_rng(rank)
    arrays = {dtype: rng.integers(0, 100, (rank + 1, 3)).astype(dtype) for dtype in DTYPES}
    return {
        **arrays,
        "state/empty": np.empty((0, 4), np.float32),
        "bool": np.array([True, False]),
        "model/bfloat16": rng.normal(size=5).astype(ml_dtypes.bfloat16),
        "scalar": np.array(7.5),
        "large": rng.normal(size=1000 * (rank + 1)),
    }


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return list(one) == list(other) and all(
        a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        for a, b in zip(one.values(), other.values(), strict=True)
    )


@pytest.mark.parametrize("piece_bytes", [6, 1000, 1 << 20])
def test_arrays_are_gathered_in_a_file_and_returned(piece_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(transfer, "PIECE_BYTES", piece_bytes)

    def run(collectives):
        rank, own = collectives.rank, arrays_of(collectives.rank)
        gathered = rank_states.gather(own, {"rank": rank}, collectives, lambda specs: Draft(tmp_path, 1, specs))
        file = None
        if gathered is not None:
            gathered.draft().commit({"shared": np.zeros(3)}, {"ranks": 3})
            file = RankFileReader(tmp_path / "step-00000001" / "ranks.safetensors", 3)
            assert same({name: file.array(2, name) for name, *_ in file.specs[2]}, arrays_of(2))
        values = [] if gathered is None else [{"dict": {"own": {"array": "scalar"}, "n": n}} for n in (0, 1, 2)]
        if values:
            values[1] = {"dict": {"n": 1}}
        received: dict[str, np.ndarray] = {}

        class Variable:
            def __init__(self, name):
                self.assign = lambda array: received.__setitem__(name, array)

        variables = {name: Variable(name) for name in own if name != "scalar"}
        value = rank_states.scatter(file, values, variables, collectives)
        assert value["n"] == rank
        if own:
            received["scalar"] = value["own"]
        assert same({name: received[name] for name in own}, own)
        arrays = {"a": np.arange(50.0), "b": np.array(3, np.int8)}
        all_ranks = rank_states.broadcast_arrays(arrays if rank == 0 else {}, specs_of(arrays), collectives)
        assert same(all_ranks, arrays)
        return "done"

    assert on_threads(3, run) == ["done"] * 3


def test_rank_0_holds_one_piece_of_each_rank_at_a_time(monkeypatch):
    monkeypatch.setattr(transfer, "PIECE_BYTES", 4096)
    sizes = []

    def run(collectives):
        def receive(rank, piece):
            sizes.append(len(piece))

        transfer.to_first_rank([np.zeros(10_000)], collectives, receive)

    assert on_threads(3, run) == [None] * 3
    assert sum(sizes) == 3 * 80_000
    assert max(sizes) == 2048


def test_a_full_disk_on_rank_0_keeps_no_rank_waiting(tmp_path, monkeypatch):
    monkeypatch.setattr(transfer, "PIECE_BYTES", 1000)
    write = RankFileWriter.write

    def full_after_two_pieces(self, rank, piece):
        self.pieces = getattr(self, "pieces", 0) + 1
        if self.pieces > 2:
            raise OSError(28, "No space left on device")
        write(self, rank, piece)

    monkeypatch.setattr(RankFileWriter, "write", full_after_two_pieces)

    def run(collectives):
        gathered = rank_states.gather(
            arrays_of(collectives.rank), None, collectives, lambda specs: Draft(tmp_path, 1, specs)
        )
        if gathered is not None:
            with pytest.raises(OSError, match="No space left"):
                gathered.draft()
        return "done"

    assert on_threads(3, run) == ["done"] * 3
    assert not list(tmp_path.iterdir())


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except FileNotFoundError:  # that by which the folder is listed
        return ""


@pytest.mark.parametrize("most_bytes", [10, 1000], ids=["header", "arrays"])
def test_a_file_that_cannot_be_written_takes_up_no_space(most_bytes, tmp_path):
    """It is deleted, but would take up space while it is open; the error, which is kept, refers to it."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    array = np.zeros(2000, np.uint8)
    gc.disable()
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, limits[1]))
        specs = specs_of({"array": array})
        gathered = rank_states.Gathered([(specs, None)], lambda specs: Draft(tmp_path, 1, specs))
        gathered.write(0, array)
        assert not list(tmp_path.iterdir())
        assert not [link for each in Path("/proc/self/fd").iterdir() if str(tmp_path) in (link := _target(each))]
        with pytest.raises(OSError, match="File too large"):
            gathered.draft()
    finally:
        gc.enable()
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_file_that_becomes_unreadable_is_an_error_on_all_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(transfer, "PIECE_BYTES", 1000)
    path = tmp_path / "ranks.safetensors"
    writer = RankFileWriter(path, [specs_of(arrays_of(rank)) for rank in range(3)])
    writer.close()

    def run(collectives):
        file = None
        if collectives.rank == 0:
            file = RankFileReader(path, 3)
            path.unlink()
        with pytest.raises(Exception, match="a checkpoint must stay readable") as caught:
            rank_states.scatter(file, [None] * 3, {}, collectives)
        return caught.value.exit_code

    assert on_threads(3, run) == [65] * 3


def test_the_file_has_the_format_of_safetensors(tmp_path):
    path, arrays = tmp_path / "ranks.safetensors", {"x": np.arange(6.0).reshape(2, 3), "y": np.array(True)}
    writer = RankFileWriter(path, [specs_of(arrays)])
    writer.write(0, ArrayReader(list(arrays.values())).read(1000))
    writer.close()
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    assert (8 + length) % 8 == 0
    assert json.loads(content[8 : 8 + length]) == {
        "rank0/x": {"dtype": "F64", "shape": [2, 3], "data_offsets": [0, 48]},
        "rank0/y": {"dtype": "BOOL", "shape": [], "data_offsets": [48, 49]},
    }
    assert content[8 + length :] == arrays["x"].tobytes() + arrays["y"].tobytes()


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xff" * 8,
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 9) + b'{"x":[]}}',
        struct.pack("<Q", 1 << 40),
        struct.pack("<Q", 60) + b'{"rank0/x":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}'[:60],
    ],
)
def test_a_file_of_another_format_is_refused(header, tmp_path):
    (tmp_path / "file").write_bytes(header)
    with pytest.raises((ValueError, LookupError, TypeError, AttributeError, OSError)):
        RankFileReader(tmp_path / "file", 1)


def test_pieces_need_not_end_with_arrays():
    arrays = arrays_of(2)
    reader, found = ArrayReader(list(arrays.values())), {}
    writer = ArrayWriter(specs_of(arrays), found.__setitem__)
    while len(piece := reader.read(11)):
        writer.write(piece)
    assert same(found, arrays)


class Rows:
    """An array in blocks, of which each exists only while it is read."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def blocks(self):
        yield from (self.array[start : start + 3].copy() for start in range(0, len(self.array), 3))


def test_arrays_in_blocks_travel_with_others(monkeypatch):
    monkeypatch.setattr(row_shards, "BLOCK_BYTES", 50)
    table = np.random.default_rng(0).normal(size=(11, 3)).astype(np.float32)
    arrays = {"before": np.arange(5), "table": Rows(table), "empty": Rows(table[:0]), "after": np.array(7.5)}
    reader, found, written = ArrayReader(list(arrays.values())), {}, np.zeros_like(table)
    assert reader.num_bytes == 5 * 8 + table.nbytes + 8

    def write(start, rows):
        assert rows.nbytes <= 50
        written[start : start + len(rows)] = rows

    writer = ArrayWriter(specs_of(arrays), found.__setitem__, {"table": write, "empty": write})
    while len(piece := reader.read(13)):
        writer.write(piece)
    assert np.array_equal(written, table)
    assert same(found, {"before": arrays["before"], "after": arrays["after"]})


@pytest.mark.parametrize("name", ["large", "small"])
def test_tensors_are_released_when_they_have_been_read_back(name, tmp_path, monkeypatch):
    tensors = {"small": np.zeros(3), "large": np.zeros(1000)}
    held = dict(tensors)
    Draft(tmp_path, 1, [[]]).commit(held, {})
    assert not held
    save = draft._save
    monkeypatch.setattr(draft, "_save", lambda own, prefix: save({**own, name: own[name] + 1}, prefix))
    with pytest.raises(OSError, match=f"the data read back differs from the data written: {name}"):
        Draft(tmp_path, 2, [[]]).commit(dict(tensors), {})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
