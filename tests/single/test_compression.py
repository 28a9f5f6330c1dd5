"""Compression without other ranks: what is sent, and what is kept."""

import numpy as np
import pytest
import tensorflow as tf

import hvdtrain
from hvdtrain.distributed.compressed_reduction import make_reducer
from hvdtrain.distributed.compression_memory import CompressionMemory
from hvdtrain.distributed.compression_names import make_compression
from hvdtrain.distributed.config import ReductionConfig
from hvdtrain.distributed.power_sgd import matrix_shape
from hvdtrain.distributed.single_process import SingleProcessCollectives
from hvdtrain.errors import UsageError
from hvdtrain.tasks.loading import load_task

SPECS = [tf.TensorSpec((3, 2), tf.float32), tf.TensorSpec((4,), tf.float32)]


def memory_of(num_ranks, *, sums=False) -> CompressionMemory:
    memory = CompressionMemory(num_ranks, sums=sums)
    memory.require(SPECS, {"q": np.ones(2, np.float32)})
    return memory


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("none", None),
        ("fp16", hvdtrain.FP16(start_after=3)),
        ("powersgd:4", hvdtrain.PowerSGD(rank=4, start_after=3)),
    ],
)
def test_names(name, found):
    assert make_compression(name, 3) == found


@pytest.mark.parametrize("name", ["", "powersgd", "powersgd:0", "powersgd:-1", "powersgd:x", "fp16:2", "bf16"])
def test_unknown_names_are_refused(name):
    with pytest.raises(UsageError, match="compression must be none, fp16, or powersgd:RANK"):
        make_compression(name)


@pytest.mark.parametrize(
    "make",
    [
        lambda: hvdtrain.PowerSGD(rank=0),
        lambda: hvdtrain.FP16(start_after=-1),
        lambda: hvdtrain.PowerSGD(start_after=-1),
    ],
)
def test_options_that_break_a_rule_are_refused(make):
    with pytest.raises(UsageError, match="must be at least"):
        make()


def test_kernels_become_the_most_nearly_square_matrices():
    assert matrix_shape((3, 3, 512, 512)) == (3 * 3 * 512, 512)
    assert matrix_shape((128, 4, 32)) == (128, 128)
    assert matrix_shape((4, 32, 128)) == (128, 128)
    assert matrix_shape((10, 3)) == (10, 3)


@pytest.mark.parametrize(
    ("task", "whole_mb", "sent_mb"),
    [("cifar10", 4.3, 0.09), ("synthetic-transformer", 29.4, 0.65), ("synthetic-resnet50", 102, 1.6)],
)
def test_bytes_of_built_in_tasks(task, whole_mb, sent_mb):
    task = load_task(task)
    model = task.make_model(None)
    compression, whole, sent = hvdtrain.PowerSGD(rank=4), 0, 0
    for each in model.trainable_variables:
        size = 4 * each.value.shape.num_elements()
        whole += size
        sent += compression.num_bytes(tf.TensorSpec(each.value.shape, tf.float32)) or size
    assert (whole / 1e6, sent / 1e6) == (pytest.approx(whole_mb, rel=0.02), pytest.approx(sent_mb, rel=0.1))


def test_what_saves_less_than_half_is_sent_whole():
    compression = hvdtrain.PowerSGD(rank=2)
    assert compression.num_bytes(tf.TensorSpec((8, 8), tf.float32)) == 2 * 16 * 4
    for spec in (tf.TensorSpec((8, 7), tf.float32), tf.TensorSpec((640,), tf.float32), tf.TensorSpec((8, 8), tf.int32)):
        assert compression.num_bytes(spec) is None
    assert hvdtrain.FP16().num_bytes(tf.TensorSpec((), tf.float32)) is None
    assert hvdtrain.FP16().num_bytes(tf.TensorSpec((7,), tf.float32)) == 14


def test_values_that_are_restored_before_the_first_step_wait_for_it():
    memory = CompressionMemory(2, sums=False)
    memory.slot("error_0").assign(np.full((3, 2), 5, np.float32))
    # A run that stops before its first step saves them again.
    assert {name: each.numpy().sum() for name, each in memory.variables().items()} == {"error_0": 30}
    memory.slot("error_1").assign(np.zeros(9, np.float32))  # of another shape: of another model or compression
    memory.require(SPECS, {"q": np.ones(2, np.float32)})
    assert (memory.errors[0].numpy() == 5).all()
    assert not memory.errors[1].numpy().any()
    memory.slot("q").assign(np.zeros(2, np.float32))
    memory.slot("other").assign(np.zeros(2, np.float32))
    assert not memory.shared["q"].numpy().any()


@pytest.mark.parametrize("compression", ["fp16", "powersgd:2"])
@pytest.mark.parametrize("op", ["average", "sum"])
def test_a_rank_alone_compresses_nothing_and_sends_what_others_had_not(compression, op):
    reducer = make_reducer(SingleProcessCollectives(), ReductionConfig(op=op), make_compression(compression))
    own = [np.random.default_rng(i).normal(size=(32, 40)).astype(np.float32) for i in range(3)]
    error, q = np.full((32, 40), 3, np.float32), np.ones((40, 2), np.float32)

    def reduced(gradient, reducer=reducer):
        run = tf.function(lambda each: reducer([each]).gradients, autograph=False)
        return run(tf.constant(gradient))[0].numpy()

    assert np.array_equal(reduced(own[0]), own[0])
    assert reducer.memory.variables() == {}
    resumed = make_reducer(SingleProcessCollectives(), ReductionConfig(op=op), make_compression(compression))
    slot = resumed.memory.slot("error_0")
    slot.assign(slot.of_other_ranks([error, 2 * error], 1))
    resumed.memory.slot("q_0").assign(q)
    total = sum(reduced(each, resumed) for each in own)
    assert total == pytest.approx(sum(own) + (3 * error if op == "sum" else 1.5 * error), abs=1e-5)
    # Kept for a run on several ranks that continues from here.
    kept = {name: each.numpy() for name, each in resumed.memory.variables().items()}
    assert not kept.pop("error_0").any()
    assert all(np.array_equal(each, q) for each in kept.values())
    assert list(kept) == ([] if compression == "fp16" else ["q_0"])


@pytest.mark.parametrize("sums", [False, True])
def test_errors_count_as_much_among_other_ranks(sums):
    """What they add to the reduced gradient: their mean, or their sum."""
    values = [np.float32([1, 2]), np.float32([3, 6])]
    reduced = sum(values) if sums else sum(values) / 2
    now = 5
    each = memory_of(2, sums=sums).slot("error_0").of_other_ranks(values, now)
    assert (now * each if sums else each) == pytest.approx(reduced)
    # In an elastic job, others join, and have none.
    memories = [memory_of(2, sums=sums) for _ in values]
    total = 0
    for memory, value in zip(memories, values, strict=True):
        memory.errors[1].assign(np.concatenate([value, value]))
        memory.change_ranks(now, keeps_errors=True)
        memory.change_ranks(now, keeps_errors=True)  # changes nothing
        total += memory.errors[1].numpy()[:2]
    assert (total if sums else total / now) == pytest.approx(reduced)
    memories[0].change_ranks(3, keeps_errors=False)
    assert not memories[0].errors[1].numpy().any()


def test_what_ranks_have_in_common_stays():
    assert memory_of(2).slot("q").of_other_ranks([np.float32(7), np.float32(7)], 5) == 7
