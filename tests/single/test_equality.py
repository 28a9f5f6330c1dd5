"""The parts of the check of a step that need no other rank."""

import contextlib
import tracemalloc

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdtrain
from hvdtrain.distributed.single_process import SingleProcessCollectives
from hvdtrain.optim.kept_batch import KeptBatch
from hvdtrain.optim.method_replacement import replace_method
from hvdtrain.training.equality.comparison import Comparison
from hvdtrain.training.equality.compiled_recurrence import compiled_recurrence
from hvdtrain.training.equality.norms import norm
from hvdtrain.training.equality.samples import Rows, gather_samples
from hvdtrain.training.equality.scheduled_check import ScheduledCheck
from hvdtrain.training.equality.step_check import Finding
from hvdtrain.training.equality.updates import Update, distance, norm_of
from hvdtrain.training.equality.ways import CheckedStep, Outcome
from hvdtrain.training.equality.written_variables import WrittenVariables


class FirstOfTwo(SingleProcessCollectives):
    """Rank 0 of two, the other of which has a batch of its own."""

    size = 2

    def __init__(self, other):
        super().__init__()
        self._other = other

    def allgather(self, value):
        sent = []
        if self._other is not None:
            other, self._other = self._other, None
            gather_samples(other, _Sending(sent))
        return [value, *sent]


class _Sending(SingleProcessCollectives):
    size = 2

    def __init__(self, sent):
        super().__init__()
        self._sent = sent

    def allgather(self, value):
        self._sent.append(value)
        return [value, value]


def gathered(own, other):
    return gather_samples(own, FirstOfTwo(other))


def test_the_whole_batch_has_so_many_samples_as_a_batch():
    samples = gathered({"x": tf.range(8), "y": None}, {"x": tf.range(10, 18), "y": None})
    assert samples.whole["x"].numpy().tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    assert samples.part["x"].numpy().tolist() == [0, 1, 2, 3]
    assert samples.whole["y"] is None
    assert samples.rows.sizes == (4, 4)


def test_batches_of_other_sizes_and_lengths():
    samples = gathered(tf.ones([4, 2]), tf.ones([2, 3]))
    assert samples.rows.sizes == (2, 1)
    assert samples.whole.numpy().tolist() == [[1, 1, 0], [1, 1, 0], [1, 1, 1]]
    assert samples.part.shape == (2, 3)
    equal = gather_samples(tf.ones([4, 2]), FirstOfTwo(tf.ones([2, 3])), equally_many=True)
    assert equal.whole.numpy().tolist() == [[1, 1, 0], [1, 1, 1]]
    assert equal.rows.are_equally_many
    assert gathered(tf.zeros([0, 2]), tf.ones([2, 2])) is None


def test_text_ragged_and_sparse_batches():
    text, ragged = tf.constant([b"a", b"bc"]), tf.ragged.constant([[1.0], [2.0, 3.0]])
    sparse = tf.sparse.from_dense([[0.0, 4.0], [5.0, 0.0]])
    samples = gathered((text, ragged, sparse), (text, ragged, sparse))
    whole_text, whole_ragged, whole_sparse = samples.whole
    assert whole_text.numpy().tolist() == [b"a", b"a"]
    assert whole_ragged.to_list() == [[1.0], [1.0]]
    assert tf.sparse.to_dense(whole_sparse).numpy().tolist() == [[0.0, 4.0], [0.0, 4.0]]
    assert samples.part[1].to_list() == [[1.0]]


def test_what_has_no_samples_is_sent_as_it_is():
    samples = gathered((tf.ones([4, 2]), tf.constant(3.0)), (tf.ones([4, 2]), tf.constant(3.0)))
    assert float(samples.whole[1]) == 3.0
    assert float(samples.part[1]) == 3.0


def test_the_same_batch_on_both_ranks():
    x = np.arange(8.0)
    assert gathered(x, x.copy()).are_the_same
    assert not gathered(x, x + 1).are_the_same
    assert not gathered(np.ones(8), np.ones(8)).are_the_same  # Samples that are all equal say nothing.


def test_dimensions_of_samples():
    rows = Rows(rank=1, sizes=(4, 4))
    assert rows.part_of(8, 4) == slice(4, 8)
    assert rows.part_of(24, 12) == slice(12, 24)
    assert rows.part_of(10, 5) is None
    assert rows.part_of(8, 8) is None
    rows = Rows(rank=1, sizes=(1, 3))
    assert rows.part_of(4, 3) == slice(1, 4)
    assert rows.part_of(8, 6) == slice(2, 8)
    assert rows.part_of(8, 4) is None


def test_variables_are_restored_whoever_writes_them():
    first, second = keras.Variable([1.0, 2.0]), tf.Variable([3.0])
    written = WrittenVariables()
    with written.noted():
        first.assign_add([1.0, 1.0])
        first.assign([7.0, 7.0])
        second.scatter_update(tf.IndexedSlices([9.0], [0]))
    second.assign([5.0])
    assert [each.before.numpy().tolist() for each in written.found] == [[1.0, 2.0], [3.0]]
    written.restore()
    assert first.numpy().tolist() == [1.0, 2.0]
    assert second.numpy().tolist() == [3.0]


def test_distances_of_dense_and_sparse_gradients():
    dense = tf.constant([[3.0, 4.0], [0.0, 0.0]])
    sparse = tf.IndexedSlices(tf.constant([[1.0, 4.0], [2.0, 0.0]]), tf.constant([0, 0]), [2, 2])
    assert norm_of(dense) == norm_of(sparse) == 5
    assert distance(dense, sparse) == distance(sparse, dense) == 0
    assert distance(sparse, tf.IndexedSlices(tf.constant([[3.0, 4.0]]), tf.constant([1]), [2, 2])) == pytest.approx(
        50**0.5
    )


def test_rows_that_are_not_added_up_are_another_gradient():
    """An adaptive optimizer squares each entry."""
    repeated = tf.IndexedSlices(tf.constant([[1.0, 4.0], [2.0, 0.0]]), tf.constant([0, 0]), [2, 2])
    once = tf.IndexedSlices(tf.constant([[3.0, 4.0]]), tf.constant([0]), [2, 2])
    variable = keras.Variable(np.zeros((2, 2), "float32"), name="embeddings")
    comparison = Comparison(Outcome(updates=[Update([variable], [once])]), 2.0**-23)
    comparison.begin()
    comparison.apply(None, Update([variable], [repeated]))
    (found,) = comparison.deviations(Outcome())
    assert found.size == pytest.approx(5 - 21**0.5)
    assert found.size > found.rounding


class Counted:
    """A check of steps that are equal."""

    is_within_update = False

    def __init__(self):
        self.batches, self.num_restarts = [], 0

    def restart(self):
        self.num_restarts += 1

    def run(self, batch):
        self.batches.append(batch)
        return Finding({})


class TwoRanks(SingleProcessCollectives):
    size = 2

    def allgather(self, value):
        return [value, value]


def checked_calls(scheduled, calls):
    """Makes calls, each of which has a batch or none."""
    for batch in calls:
        scheduled.before_call()
        if batch is not None:
            scheduled._batches.observe(batch)
        scheduled.after_call()


def scheduled_check(check, collectives):
    return ScheduledCheck(
        check, KeptBatch(), collectives, on_unequal="stop", how_to_continue="", report=lambda text: None
    )


def test_a_step_without_a_batch_of_a_rank_is_not_checked():
    """As with a quorum, if an update has closed before a rank begins."""
    check = Counted()
    checked_calls(scheduled_check(check, TwoRanks()), [None, None, tf.constant([3.0]), tf.constant([4.0])])
    assert [each.numpy().tolist() for each in check.batches] == [[3.0]]


def test_other_ranks_are_checked_again_but_not_in_the_call_that_follows_a_change(monkeypatch):
    monkeypatch.setattr("hvdtrain.training.equality.scheduled_check._MAX_SHARE_OF_TIME", float("inf"))
    check = Counted()
    scheduled = scheduled_check(check, TwoRanks())
    checked_calls(scheduled, [tf.constant([1.0]), tf.constant([2.0])])
    scheduled.restart()
    checked_calls(scheduled, [tf.constant([3.0 + call]) for call in range(17)])
    assert [each.numpy().tolist() for each in check.batches] == [[1.0], [18.0]]
    assert check.num_restarts == 2


def test_other_ranks_check_the_next_call_if_none_was_checked():
    """As after a loss within the first check."""
    check = Counted()
    scheduled = scheduled_check(check, TwoRanks())
    checked_calls(scheduled, [None])
    scheduled.restart()
    checked_calls(scheduled, [tf.constant([1.0]), tf.constant([2.0])])
    assert [each.numpy().tolist() for each in check.batches] == [[1.0]]


class Newcomer(TwoRanks):
    """A rank that has checked nothing, beside rank 0, which has, as they compare first."""

    has_compared = False

    def allgather(self, value):
        of_rank_0, self.has_compared = (value if self.has_compared else True), True
        return [of_rank_0, value]


def test_a_newcomer_checks_when_rank_0_does(monkeypatch):
    monkeypatch.setattr("hvdtrain.training.equality.scheduled_check._MAX_SHARE_OF_TIME", float("inf"))
    check = Counted()
    checked_calls(scheduled_check(check, Newcomer()), [tf.constant([float(call)]) for call in range(17)])
    assert [each.numpy().tolist() for each in check.batches] == [[15.0]]


def test_a_rank_that_is_left_alone_is_not_checked():
    check = Counted()
    checked_calls(scheduled_check(check, SingleProcessCollectives()), [tf.constant([1.0])])
    assert check.batches == []


def sequences(rows):
    return np.random.RandomState(rows).normal(size=(rows, 7, 3)).astype("float32")


@pytest.mark.parametrize(
    ("layer", "is_shared"),
    [
        (keras.layers.LSTM(4, return_sequences=True), True),
        (keras.layers.GRU(4, go_backwards=True), True),
        (keras.layers.LSTM(4, unroll=True), True),
        (keras.layers.SimpleRNN(4, dropout=0.5, seed=1), False),
    ],
    ids=["LSTM", "backwards", "unrolled", "dropout"],
)
def test_ways_to_make_a_step_share_compiled_time_steps(layer, is_shared):
    own, calls = keras.layers.RNN.inner_loop, []

    def noted(self, *arguments, **named):
        calls.append(tf.executing_eagerly())
        return own(self, *arguments, **named)

    layer(sequences(1))
    expected = [layer(sequences(rows)).numpy() for rows in (4, 2)]
    restore = replace_method(keras.layers.RNN, "inner_loop", noted)
    try:
        with compiled_recurrence():
            found = [layer(sequences(rows)).numpy() for rows in (4, 2)]
            assert calls == [False]
            calls.clear()
            for rows in (4, 2):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(layer(sequences(rows), training=True) ** 2)
                assert all(np.any(each) for each in tape.gradient(loss, layer.trainable_variables))
            assert calls == [False] * (1 if is_shared else 2)
    finally:
        restore()
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "layer",
    [
        keras.layers.LSTM(4, return_sequences=True, return_state=True),
        keras.layers.LSTM(4, go_backwards=True, return_sequences=True),
        keras.layers.GRU(4, zero_output_for_mask=True, return_sequences=True, return_state=True),
        keras.layers.GRU(4),
        keras.layers.RNN([keras.layers.LSTMCell(4), keras.layers.SimpleRNNCell(3)], return_sequences=True),
        keras.layers.Bidirectional(keras.layers.SimpleRNN(4)),
    ],
    ids=["states", "backwards", "zeros", "last", "stacked", "bidirectional"],
)
@pytest.mark.parametrize("is_masked", [False, True])
def test_compiled_time_steps_are_a_recurrent_layer(layer, is_masked):
    x = tf.constant(sequences(3))
    is_valid = np.array([[1, 0, 1, 1, 0, 0, 1], [0, 0, 1, 1, 1, 1, 0], [1] * 7])
    mask = tf.constant(is_valid == 1) if is_masked else None

    def outputs_and_gradients():
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = tf.nest.flatten(layer(x, mask=mask))
            loss = tf.add_n([tf.reduce_sum(tf.sin(each + i)) for i, each in enumerate(outputs)])
        return [*outputs, *tape.gradient(loss, [x, *layer.trainable_variables])]

    expected = outputs_and_gradients()
    with compiled_recurrence():
        found = outputs_and_gradients()
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [0, 1, 65_536, 200_001])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_norms_of_arrays(size, dtype):
    one, other = (np.random.default_rng(seed).normal(size=size).astype(dtype) for seed in range(2))
    wide = [each.astype(np.float64) for each in (one, other)]
    assert norm(one) == pytest.approx(np.linalg.norm(wide[0]), rel=1e-12)
    assert norm(one, minus=other) == pytest.approx(np.linalg.norm(wide[0] - wide[1]), rel=1e-12)
    assert np.isnan(norm(np.append(one, np.nan)))


def test_a_norm_copies_no_array():
    one, other = np.ones((2000, 1000), np.float32), np.zeros((2000, 1000), np.float32)
    tracemalloc.start()
    assert norm(one, minus=other) == pytest.approx(np.sqrt(2e6))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < one.nbytes / 2


def test_the_values_after_a_step_are_not_copied():
    """They are the memory of the variables, which get their former values back."""
    hvdtrain.init()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2048)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    variable = model.trainable_variables[0]
    before = variable.numpy()
    addresses = []

    def step(batch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(batch) ** 2)
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        addresses.append(np.asarray(tf.identity(variable.value)).__array_interface__["data"][0])

    checked = CheckedStep(step, model, SingleProcessCollectives())
    outcome = checked.of_one_process(
        np.ones((4, 2), np.float32), lambda written: contextlib.nullcontext(), lambda leaf, update: update.gradients
    )
    change = next(each for name, each in outcome.changes.items() if name.endswith("kernel"))
    assert change.after.__array_interface__["data"][0] == addresses[0]
    assert not np.array_equal(change.after, before)
    np.testing.assert_array_equal(change.before, before)
    np.testing.assert_array_equal(variable.numpy(), before)
