"""Overwriting variables with another rank's: what is sent, and what arrives."""

import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.distributed import bounded_messages
from hvdtrain.distributed.variable_broadcast import overwrite_with_received

TYPES = [tf.float32, tf.bfloat16, tf.bool, tf.uint32, tf.int64, tf.float16, tf.uint8]
SHAPES = [(3,), (), (2, 5), (0, 4), (7, 1)]


def variables(seed):
    generator = np.random.default_rng(seed)
    return [
        tf.Variable(tf.cast(generator.integers(0, 2 if dtype == tf.bool else 100, shape), dtype))
        for dtype in TYPES
        for shape in SHAPES
    ]


def broadcast(of_root, of_receiver):
    """Both sides of a broadcast, one after the other; returns the names and sizes of its messages."""
    sent = {}

    def send(tensor, name):
        sent[name] = tf.identity(tensor)
        return tensor

    def receive(tensor, name):
        assert (tensor.shape, tensor.dtype) == (sent[name].shape, sent[name].dtype)
        return sent[name]

    overwrite_with_received(of_root, send, is_root=True)
    overwrite_with_received(of_receiver, receive, is_root=False)
    return {name: len(tensor) for name, tensor in sent.items()}


def test_variables_of_all_types_arrive_in_one_message():
    root, receiver = variables(1), variables(2)
    messages = broadcast(root, receiver)
    assert list(messages.values()) == [sum(bounded_messages.num_bytes(each) for each in root)]
    for ours, theirs in zip(receiver, root, strict=True):
        assert np.array_equal(ours.numpy(), theirs.numpy())


@pytest.mark.parametrize("piece_bytes", [16, 64])
def test_messages_are_bounded(piece_bytes, monkeypatch):
    monkeypatch.setattr(bounded_messages, "PIECE_BYTES", piece_bytes)
    root, receiver = ([tf.Variable(np.full(size, value, np.float32)) for size in (2, 1, 40, 3)] for value in (1, 2))
    # Not in a compiled function, in which messages are symbols.
    monkeypatch.setattr("hvdtrain.distributed.variable_broadcast.run_compiled", lambda function: function())
    messages = broadcast(root, receiver)
    assert max(messages.values()) <= piece_bytes
    assert sum(messages.values()) == 4 * 46
    assert all((each.numpy() == 1).all() for each in receiver)


def test_nothing_is_compiled_for_small_variables(monkeypatch):
    """Compiling a function of all variables took ten seconds for ResNet-50 and Adam, at each change of ranks."""

    def run_compiled(function):
        raise AssertionError("a broadcast of small variables must not be compiled")

    monkeypatch.setattr("hvdtrain.distributed.variable_broadcast.run_compiled", run_compiled)
    broadcast(variables(1), variables(2))


def test_many_large_variables_are_no_reason_to_warn(monkeypatch):
    monkeypatch.setattr(bounded_messages, "PIECE_BYTES", 16)
    warnings = []
    monkeypatch.setattr(tf.get_logger(), "warning", lambda *message: warnings.append(message))
    received = [tf.Variable(np.zeros(size, np.float32)) for size in range(20, 40)]
    overwrite_with_received(received, lambda own, name: own + tf.ones([], tf.uint8), is_root=False)
    assert all((each.numpy() != 0).all() for each in received)
    assert not warnings
