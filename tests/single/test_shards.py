"""The parts into which variables are divided: together they are the variable, for any shape and number of ranks."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.checkpoint import storage
from hvdtrain.checkpoint.draft import Draft
from hvdtrain.checkpoint.joined_parts import JoinedParts
from hvdtrain.checkpoint.shared_tensors import SharedTensors
from hvdtrain.distributed import shards
from hvdtrain.distributed.shards import (
    Part,
    mark_part,
    num_pieces,
    part_length,
    rows_of_parts,
    whole_of_arrays,
    whole_of_rows,
    whole_shape,
    whole_variables,
)

PROPERTY = settings(derandomize=True, deadline=None, database=None)
SHAPES = st.lists(st.integers(0, 40), max_size=3).map(tuple)


@PROPERTY
@given(SHAPES, st.integers(1, 9), st.sampled_from([1 << 20, 100]))
def test_parts_are_equally_long_and_make_up_the_whole(shape, num_ranks, piece_elements):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "PIECE_ELEMENTS", piece_elements)
        check_parts(shape, num_ranks)


def check_parts(shape, num_ranks):
    whole = np.arange(1, 1 + math.prod(shape), dtype=np.float32).reshape(shape)
    parts = [Part(shape, rank, num_ranks).of(tf.constant(whole)).numpy() for rank in range(num_ranks)]
    length = part_length(whole.size, num_ranks)
    assert length % (32 * num_pieces(whole.size)) == 0
    assert {part.shape for part in parts} == {(length,)}
    assert np.array_equal(np.concatenate(parts)[: whole.size], whole.ravel())
    assert not np.concatenate(parts)[whole.size :].any()
    rows = rows_of_parts(tf.constant(whole), num_ranks)
    assert np.array_equal(rows, np.reshape(parts, rows.shape))
    assert np.array_equal(whole_of_rows(rows, shape), whole)
    assert np.array_equal(whole_of_arrays(parts, shape), whole)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 64])
def test_a_rank_has_its_share_of_a_large_variable(num_ranks):
    assert num_ranks * part_length(1_000_003, num_ranks) < 1.05 * 1_000_003


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_part_shares_the_memory_of_its_variable(dtype):
    """Copies would take 1/N of the weights on each rank, from one step to the next."""
    variable = tf.Variable(tf.random.normal([512, 3]) if dtype == "float32" else tf.zeros([512, 3], dtype))
    first = np.asarray(variable.read_value()).ctypes.data
    for rank in range(4):
        part = Part((512, 3), rank, 4).of(variable)
        assert np.asarray(part).ctypes.data == first + rank * 384 * part.dtype.size


def test_arrays_of_other_shapes_are_no_parts():
    with pytest.raises(ValueError, match=r"those of the parts of shape \(40,\)"):
        whole_of_arrays([np.zeros(32), np.zeros(64)], (40,))


def test_a_variable_that_holds_a_part_has_the_shape_of_the_whole():
    variables = [keras.Variable(np.zeros(32)) for _ in range(2)]
    mark_part(variables[0], Part((5, 7), 0, 2))
    assert [whole_shape(each) for each in variables] == [(5, 7), (32,)]
    assert whole_variables(variables) == variables[1:]


class RankFile:
    """The arrays of two ranks."""

    specs = ([], [])

    def array(self, rank: int, name: str) -> np.ndarray:
        return np.full(32, rank + 1.0)


def test_names_in_a_checkpoint_are_found_without_reading_tensors(tmp_path, monkeypatch):
    Draft(tmp_path, 1, [[]]).commit({"a": np.zeros(2)}, {"ranks": 1, "variables": [], "own": {}})
    tensors = SharedTensors(tmp_path / "step-00000001" / storage.TENSORS)
    manifest = {"variables": [["b", [40], "float32"]], "own": {"parts": [["b", [32], "float32"]]}}
    joined = JoinedParts(tensors, RankFile(), manifest)
    monkeypatch.setattr(SharedTensors, "__getitem__", None)
    monkeypatch.setattr(JoinedParts, "__getitem__", None)
    assert [name in joined for name in "abc"] == [True, True, False]


def test_tensors_are_those_of_the_arrays(tmp_path):
    values = {
        each: tf.cast([[0, 1], [1, 2]], each)
        for each in ("float16", "bfloat16", "float64", "int32", "int64", "uint32", "bool", "int8")
    }
    Draft(tmp_path, 1, [[]]).commit(dict(values), {"ranks": 1, "variables": [], "own": {}})
    tensors = SharedTensors(tmp_path / "step-00000001" / storage.TENSORS)
    manifest = {"variables": [["b", [40], "float32"]], "own": {"parts": [["b", [32], "float32"]]}}
    joined = JoinedParts(tensors, RankFile(), manifest)
    for name, value in values.items():
        assert joined.tensor(name).dtype == value.dtype
        np.testing.assert_array_equal(joined.tensor(name), value)
        np.testing.assert_array_equal(joined[name], value)
    assert joined.tensor("b").numpy().tolist() == [1.0] * 32 + [2.0] * 8


def test_a_checkpoint_shows_joined_parts_like_any_tensor():
    manifest = {
        "variables": [["a", [2], "float32"], ["b", [40], "float32"]],
        "own": {"parts": [["b", [32], "float32"]]},
    }
    joined = JoinedParts({"a": np.zeros(2)}, RankFile(), manifest)
    assert list(joined) == ["a", "b"]
    assert len(joined) == 2
    assert joined["b"].tolist() == [1.0] * 32 + [2.0] * 8
    assert joined["a"].tolist() == [0.0, 0.0]
    assert "a" in joined
    assert "c" not in joined
    with pytest.raises(KeyError):
        joined["c"]
