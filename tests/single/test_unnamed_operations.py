"""Horovod's operations without names in a step."""

import pytest
import tensorflow as tf

from hvdtrain.distributed.single_process import SingleProcessCollectives
from hvdtrain.optim import unnamed_operations


class FirstOfTwo(SingleProcessCollectives):
    size = 2


@pytest.mark.parametrize(
    ("name", "collectives", "is_told"),
    [
        ("HorovodAllgather_Reshape_0", FirstOfTwo(), True),
        ("others", FirstOfTwo(), False),
        ("HorovodAllgather_Reshape_0", SingleProcessCollectives(), False),
    ],
    ids=["unnamed", "named", "one rank"],
)
def test_operations_without_a_name_are_told_of_once(name, collectives, is_told, monkeypatch, capsys):
    monkeypatch.setattr(unnamed_operations, "_has_told", False)

    def step(x):
        with tf.name_scope("gradient_tape"):
            x = tf.identity(x, name)
        unnamed_operations.tell_of_unnamed_operations(collectives)
        unnamed_operations.tell_of_unnamed_operations(collectives)
        return x

    tf.function(step, autograph=False)(tf.ones(2))
    printed = capsys.readouterr().err
    assert printed.count("Received: 'gradient_tape/HorovodAllgather_Reshape_0', one of 1") == int(is_told)
    assert bool(printed) == is_told
