"""On all ranks: what is larger than a message may be is sent in several."""

import numpy as np
import pytest
import tensorflow as tf
from trainings import COLLECTIVES, RANK, SIZE

from hvdtrain.distributed import bounded_messages, variable_broadcast
from hvdtrain.distributed.config import ReductionConfig


@pytest.mark.parametrize("max_message_bytes", [64, 1 << 30])
def test_messages_of_bounded_size(max_message_bytes, monkeypatch):
    """What is larger than a message is sent in several."""
    for border in ("MAX_MESSAGE_BYTES", "PIECE_BYTES"):
        monkeypatch.setattr(bounded_messages, border, max_message_bytes)
    monkeypatch.setattr(variable_broadcast, "PIECE_BYTES", max_message_bytes)
    shapes = [(), (3,), (100,), (5, 40), (2, 1, 33), (40, 3), (64, 8), (256,)]
    own = [np.random.default_rng([RANK, i]).normal(size=shape).astype(np.float32) for i, shape in enumerate(shapes)]
    everyone = COLLECTIVES.allgather((RANK, own))
    assert [rank for rank, _ in everyone] == list(range(SIZE))
    assert all(np.array_equal(mine, gathered) for mine, gathered in zip(own, everyone[RANK][1], strict=True))
    sums = [sum(theirs[i] for _, theirs in everyone) for i in range(len(shapes))]
    variables = [tf.Variable(each) for each in own]
    variables += [tf.Variable(np.full(200, RANK == 0)), tf.Variable(tf.cast(own[3], tf.bfloat16))]
    reduce = COLLECTIVES.gradient_reducer(ReductionConfig(op="sum"))

    def reduced(tensors):
        return reduce(tensors).gradients

    tensors = [*map(tf.constant, own)]
    compiled_reduction = tf.function(reduced, autograph=False)
    ways = zip(COLLECTIVES.sum(own), reduced(tensors), compiled_reduction(tensors), strict=True)
    for total, (added, eager, graph) in zip(sums, ways, strict=True):
        assert added == pytest.approx(total, abs=1e-5)
        assert eager.numpy() == pytest.approx(total, abs=1e-5)
        assert graph.numpy() == pytest.approx(total, abs=1e-5)
    assert all(np.array_equal(tensor.numpy(), value) for tensor, value in zip(tensors, own, strict=True))
    together = COLLECTIVES.sum_on_this_thread(tensors)
    for total, added in zip(sums, together, strict=True):
        assert added.numpy() == pytest.approx(total, abs=1e-5)
    for total, added in zip(
        sums, COLLECTIVES.sum_tensors([*map(tf.constant, own)], f"bounded_{max_message_bytes}"), strict=True
    ):
        assert added.numpy() == pytest.approx(total, abs=1e-5)
    COLLECTIVES.broadcast(variables)
    for variable, expected in zip(variables, [*everyone[0][1], np.full(200, True)], strict=False):
        assert np.array_equal(variable.numpy(), expected)
    assert np.array_equal(variables[-1].numpy(), tf.cast(everyone[0][1][3], tf.bfloat16).numpy())


@pytest.mark.parametrize("max_elements", [2 * SIZE * 10, 2**31 - 1])
def test_rows_of_all_ranks_beyond_what_a_message_counts(max_elements, monkeypatch):
    """They are gathered in blocks of columns."""
    monkeypatch.setattr(bounded_messages, "MAX_MESSAGE_ELEMENTS", max_elements)
    everyone = [np.random.default_rng([rank, 7]).normal(size=(3, 5)).astype(np.float32) for rank in range(SIZE)]
    own = tf.IndexedSlices(tf.constant(everyone[RANK]), tf.constant([RANK, 5, 9]), tf.constant([10, 5]))
    (found,) = COLLECTIVES.gradient_reducer(ReductionConfig(op="sum"))([own]).gradients
    expected = np.zeros((10, 5), np.float32)
    for rank, values_ in enumerate(everyone):
        np.add.at(expected, [rank, 5, 9], values_)
    assert tf.convert_to_tensor(found).numpy() == pytest.approx(expected, abs=1e-5)


def large(test):
    """Messages of gigabytes: they need 21 GiB on 2 ranks."""
    return pytest.mark.long(pytest.mark.skipif(SIZE > 2, reason="needs more than 24 GiB on more than 2 ranks")(test))


@large
def test_objects_of_two_gibibytes_together():
    count = 2**31 // SIZE + 1
    gathered = COLLECTIVES.allgather(np.full(count, RANK, np.uint8))
    found = [(len(each), int(each[0]), int(each[-1])) for each in gathered]
    assert found == [(count, rank, rank) for rank in range(SIZE)]


@large
@pytest.mark.parametrize("num_bytes", [2**32 + 64, 2**31, 2**31 - 1])
def test_variables_at_the_limits_of_mpi(num_bytes):
    """MPI counts in 32 bits, and Horovod truncates larger numbers."""
    # The largest first: TensorFlow keeps memory that is freed.
    variable = tf.Variable(tf.fill([num_bytes], np.uint8(1 + RANK)))
    COLLECTIVES.broadcast([variable])
    assert [int(reduce(variable)) for reduce in (tf.reduce_min, tf.reduce_max)] == [1, 1]
