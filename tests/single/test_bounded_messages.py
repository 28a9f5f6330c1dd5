"""Cutting tensors into messages of bounded size."""

import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.distributed import bounded_messages

SHAPES = [(7,), (100,), (4099,), (64, 48), (3, 5, 7), (33, 31), (2, 4096), (1, 1)]


@pytest.fixture(params=[pytest.param(64, marks=pytest.mark.long), 256, 4096])
def piece_bytes(request, monkeypatch):
    monkeypatch.setattr(bounded_messages, "PIECE_BYTES", request.param)
    return request.param


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_element_is_sent_once(shape, is_compiled, piece_bytes):
    sizes, names = [], []

    def send(piece, suffix):
        sizes.append(4 * piece.shape.num_elements())
        names.append(suffix)
        return 2 * piece + 1

    def run(tensor):
        return bounded_messages.in_pieces(tensor, send)

    value = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    found = (tf.function(run, autograph=False) if is_compiled else run)(tf.constant(value))
    assert np.array_equal(found.numpy(), 2 * value + 1)
    assert found.shape == shape
    assert max(sizes) <= piece_bytes
    assert sum(sizes) == value.nbytes
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("shape", [(4096,), (64, 64), (4099,)])
def test_what_is_used_elsewhere_is_not_overwritten(shape, piece_bytes):
    variable = tf.Variable(tf.ones(shape))

    @tf.function(autograph=False)
    def both():
        shared = variable + 1
        first = bounded_messages.in_pieces(shared, lambda piece, suffix: 10 * piece)
        second = bounded_messages.in_pieces(shared, lambda piece, suffix: 100 * piece)
        third = bounded_messages.in_pieces(variable.value(), lambda piece, suffix: 1000 * piece)
        with tf.control_dependencies([first, second, third]):
            return first, second, third, tf.identity(shared), variable.read_value()

    assert [float(tf.reduce_min(each)) for each in both()] == [20, 200, 1000, 2, 1]
    assert [float(tf.reduce_max(each)) for each in both()] == [20, 200, 1000, 2, 1]


@pytest.mark.parametrize(
    ("shape", "width"),
    [
        ((2**20 * 40,), 2**20),
        ((40_960, 16_384), 2**20),
        ((50_257, 1_023), 1_023),  # no power of two: rows of the shape
        ((3, 2**24 + 1), None),  # rows of more than a piece
        ((2**25 + 1,), None),
        ((2**25 + 1, 3), None),  # rows of 12 bytes
    ],
)
def test_rows_of_a_large_tensor(shape, width):
    assert bounded_messages.row_width(shape, 4) == width


@pytest.mark.parametrize(
    ("num_rows", "widths"), [(0, [7]), (10, [7]), (12, [6, 1]), (40, [2, 2, 2, 1]), (999, [1] * 7)]
)
def test_rows_are_gathered_in_blocks_of_columns(num_rows, widths, monkeypatch):
    monkeypatch.setattr(bounded_messages, "MAX_MESSAGE_ELEMENTS", 80)
    matrix, sent, names = np.arange(35.0).reshape(5, 7), [], []

    def gather(columns, suffix):
        sent.append(columns.shape[1])
        names.append(suffix)
        return tf.concat([columns, -columns], axis=0)

    found = bounded_messages.in_columns(tf.constant(matrix), num_rows, gather)
    assert np.array_equal(found.numpy(), np.concatenate([matrix, -matrix]))
    assert sent == widths
    assert len(set(names)) == len(names)


def test_groups_of_bounded_size(monkeypatch):
    monkeypatch.setattr(bounded_messages, "PIECE_BYTES", 10)
    tensors = [tf.zeros(size, tf.uint8) for size in (4, 6, 1, 20, 3, 7, 0)]
    assert bounded_messages.groups_of_bounded_size(tensors) == [[0, 1], [2], [3], [4, 5, 6]]
    assert bounded_messages.groups_of_bounded_size([]) == []
