"""Arrays, Stream and the datasets made from them; ranks are simulated by their plans."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.data import Arrays, Stream, evaluation_dataset, training_dataset
from hvdtrain.data.sample_plan import SamplePlan, shard_batches
from hvdtrain.errors import DataError, UsageError


def numbered(num_samples: int, **options) -> Arrays:
    """Arrays whose x is the sample number."""
    return Arrays(np.arange(num_samples), np.arange(num_samples) % 3, **options)


def stream(length: int, **options) -> Stream:
    return Stream(tf.data.Dataset.range(length).map(lambda n: (n, n % 3)), **options)


def drawn(source, plan: SamplePlan, micro_batches: int, **options) -> list[tuple[list, float]]:
    """The x of each micro-batch and its factor."""
    dataset = training_dataset(source, plan, **options).take(micro_batches)
    return [(data[0].tolist(), float(factor)) for data, factor in dataset.as_numpy_iterator()]


def plans(size: int, **options) -> list[SamplePlan]:
    return [SamplePlan(rank=rank, size=size, **options) for rank in range(size)]


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy at an address that TensorFlow takes over without another copy."""
    memory = np.empty(array.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    copy = memory[start : start + array.nbytes].view(array.dtype)
    copy[:] = array
    return copy


@pytest.mark.parametrize("excluded", [frozenset(), frozenset(range(60, 75))])
def test_a_plan_that_begins_within_an_epoch_yields_what_it_draws(excluded):
    for plan in plans(3, num_samples=100, batch_size=4, gradient_accumulation_steps=2, first_step=7, first_sample=188):
        for first in (14, 15, 17, 30):  # the rest of that epoch is one micro-batch; then whole ones
            found = drawn(numbered(100), plan, 20, first_micro_batch=first, excluded=excluded)
            expected = [plan.draw(first + i, excluded) for i in range(20)]
            assert [(numbers, weight) for numbers, weight in found if weight] == [
                (numbers.tolist(), pytest.approx(weight)) for numbers, weight in expected if weight
            ]
            assert [bool(weight) for _, weight in found] == [bool(weight) for _, weight in expected]


def test_operations_on_weights_do_not_change_those_of_later_epochs(monkeypatch):
    """TensorFlow writes results of operations into the memory of arrays that it was given."""
    epoch_slices = SamplePlan.epoch_slices
    monkeypatch.setattr(
        SamplePlan, "epoch_slices", lambda plan, first=0: tuple(map(aligned, epoch_slices(plan, first)))
    )
    floatx = keras.config.floatx()
    keras.config.set_floatx("float64")  # Other types are converted, and so copied.
    try:
        iterator = iter(training_dataset(numbered(10), SamplePlan(num_samples=10, batch_size=4, rank=0, size=1)))

        @tf.function
        def step():
            _, weight = next(iterator)
            return weight * 0.25

        weights = [float(step()) for _ in range(12)]
    finally:
        keras.config.set_floatx(floatx)
    assert weights == [0.25] * 12


LAYOUTS = [(1, 1), (1, 2), (2, 1), (3, 2), (4, 2)]


@pytest.mark.parametrize(("size", "accumulate"), LAYOUTS)
@pytest.mark.parametrize("make", [numbered, stream])
def test_each_sample_once_per_epoch_as_numbered_by_the_plan(make, size, accumulate):
    """37 samples: on some layouts the last step leaves ranks without a sample."""
    everything = []
    for plan in plans(
        size, num_samples=37, batch_size=3, gradient_accumulation_steps=accumulate, shuffle=make is numbered
    ):
        per_epoch = plan.steps_per_epoch * accumulate
        batches = drawn(make(37), plan, 2 * per_epoch)
        assert len(batches) == 2 * per_epoch
        for micro_batch, (numbers, _) in enumerate(batches):
            assert numbers == plan.numbers(micro_batch).tolist()
        everything += [n for numbers, factor in batches[per_epoch:] if factor for n in numbers]
    assert sorted(everything) == list(range(37))


@pytest.mark.parametrize(("size", "accumulate"), LAYOUTS)
@pytest.mark.parametrize("make", [numbered, stream])
def test_mean_over_ranks_equals_mean_over_samples(make, size, accumulate):
    all_plans = plans(
        size, num_samples=25, batch_size=2, gradient_accumulation_steps=accumulate, shuffle=make is numbered
    )
    last = (all_plans[0].steps_per_epoch - 1) * accumulate
    batches = [drawn(make(25), plan, accumulate, first_micro_batch=last) for plan in all_plans]
    losses = [factor * np.mean(numbers) for each in batches for numbers, factor in each]
    own = all_plans[0].order(0)[(all_plans[0].steps_per_epoch - 1) * all_plans[0].global_batch_size :]
    assert np.mean(losses) == pytest.approx(np.mean(own), rel=1e-6)
    if all_plans[0].has_fillers:
        assert 0.0 in {factor for each in batches for _, factor in each}


def test_element_spec_of_data_and_factor():
    x = {"a": np.zeros((8, 2), np.float32), "b": np.zeros(8, np.int32)}
    source = Arrays(x, np.zeros(8), np.arange(8))
    (a, *_), factor = training_dataset(source, SamplePlan(num_samples=8, batch_size=4)).element_spec
    assert a == {"a": tf.TensorSpec([None, 2], tf.float32), "b": tf.TensorSpec([None], tf.int32)}
    assert factor == tf.TensorSpec([], tf.float32)
    data, factor = next(iter(training_dataset(source, SamplePlan(num_samples=8, batch_size=4, shuffle=False))))
    assert data[2].numpy().tolist() == [0.0, 1.0, 2.0, 3.0]
    assert float(factor) == 1.0
    assert len(next(iter(evaluation_dataset(source, 4, 0, 1)))) == 3
    assert len(next(iter(evaluation_dataset(numbered(8), 4, 0, 1)))) == 2


@pytest.mark.parametrize("make", [numbered, stream])
def test_starting_later_equals_skipping(make):
    plan = SamplePlan(
        num_samples=23, batch_size=3, rank=1, size=2, gradient_accumulation_steps=2, shuffle=make is numbered
    )
    whole = drawn(make(23), plan, 20)
    for first in (1, 4, 7, 8, 13, 16):
        assert drawn(make(23), plan, 20 - first, first_micro_batch=first) == whole[first:]


def test_excluded_samples_are_skipped_and_the_factor_shrinks():
    plan = SamplePlan(num_samples=12, batch_size=4, shuffle=False)
    batches = drawn(numbered(12), plan, 6, excluded=frozenset({1, 8, 9, 10, 11}))
    assert batches == [([0, 2, 3], 0.75), ([4, 5, 6, 7], 1.0), ([0], 0.0)] * 2
    excluded = frozenset({3, 7, 20})
    for plan in plans(3, num_samples=22, batch_size=2, gradient_accumulation_steps=2):
        per_epoch = plan.steps_per_epoch * 2
        before = drawn(numbered(22), plan, 2 * per_epoch)
        after = drawn(numbered(22), plan, 2 * per_epoch, excluded=excluded)
        for micro_batch, ((numbers, factor), (kept, kept_factor)) in enumerate(zip(before, after, strict=True)):
            assert kept == plan.numbers(micro_batch, excluded).tolist()
            left = [n for n in numbers if n not in excluded]
            assert kept_factor == pytest.approx(factor * len(left) / len(numbers))
            assert not set(kept) & excluded
            assert not left or kept == left


def test_evaluation_uses_each_sample_once():
    for make, size in itertools.product((numbered, stream), (1, 2, 3)):
        shares = [evaluation_dataset(make(10), 2, rank, size) for rank in range(size)]
        assert [n for share in shares for x, _ in share.as_numpy_iterator() for n in x] == list(range(10))


def test_evaluation_with_excluded_samples_and_first_batch():
    def batches(source, **options):
        return [x.tolist() for x, _ in evaluation_dataset(source, 2, 1, 2, **options).as_numpy_iterator()]

    excluded = frozenset({0, 5, 8, 9})
    assert batches(numbered(12), excluded=excluded) == [[6, 7], [10, 11]]
    assert batches(numbered(12), excluded=excluded, first_batch=1) == [[10, 11]]
    assert [batch.tolist() for batch in shard_batches(12, 2, 1, 2, excluded)] == [[6, 7], [10, 11]]
    assert batches(stream(12), first_batch=1) == [[8, 9], [10, 11]]
    assert batches(numbered(12), excluded=frozenset(range(6, 12))) == []


def test_excluding_all_samples_is_an_error():
    with pytest.raises(DataError, match="at least one sample must be readable"):
        training_dataset(numbered(3), SamplePlan(num_samples=3, batch_size=1), excluded=frozenset(range(3)))


def noise(x, y, seed):
    return tf.cast(x, tf.int64) * 1_000_000 + tf.random.stateless_uniform([], seed, 0, 1_000_000, tf.int64), y


def test_augmentation_depends_only_on_seed_epoch_and_sample():
    def epochs(size: int, **options) -> list[list[int]]:
        """The augmented samples of two epochs, by sample number."""
        seen: list[list[int]] = [[], []]
        for plan in plans(size, num_samples=12, batch_size=12 // size, **options):
            for epoch, (numbers, _) in enumerate(drawn(numbered(12, augment=noise), plan, 2)):
                seen[epoch] += numbers
        return [sorted(each) for each in seen]

    alone = epochs(1)
    assert epochs(2) == alone
    assert epochs(4) == alone
    assert epochs(1, shuffle=False) == alone
    assert not set(alone[0]) & set(alone[1])
    assert not set(alone[0]) & set(epochs(1, seed=1)[0])
    assert len({value % 1_000_000 for value in alone[0]}) == 12
    plan = SamplePlan(num_samples=12, batch_size=4)
    whole = drawn(numbered(12, augment=noise), plan, 6)
    assert drawn(numbered(12, augment=noise), plan, 2, first_micro_batch=4) == whole[4:]
    (x, _) = next(iter(evaluation_dataset(numbered(12, augment=noise), 12, 0, 1)))
    assert x.numpy().tolist() == list(range(12))


def test_augmentation_may_branch_on_tensors():
    def negate_odd(x, y, seed):
        if x % 2 == 1:
            x = -x
        return x, y

    seen = drawn(numbered(6, augment=negate_odd), SamplePlan(num_samples=6, batch_size=6, shuffle=False), 1)
    assert seen[0][0] == [0, -1, 2, -3, 4, -5]


def test_facts_distinguish_arrays():
    facts = [numbered(9), numbered(9), numbered(10), numbered(9, sample_weight=np.ones(9))]
    first, same, longer, weighted = [str(each.facts()) for each in facts]
    assert first == same
    assert len({first, longer, weighted}) == 3
    with pytest.raises(DataError, match="same number of samples"):
        Arrays(np.zeros(3), np.zeros(4))


def test_stream_counts_samples_if_the_cardinality_is_unknown():
    odd = tf.data.Dataset.range(20).map(lambda n: (n, n)).filter(lambda n, _: n % 2 == 1)
    source = Stream(odd)
    assert source.num_samples == 10
    plan = SamplePlan(num_samples=10, batch_size=4, shuffle=False)
    assert [numbers for numbers, _ in drawn(source, plan, 3)] == [[1, 3, 5, 7], [9, 11, 13, 15], [17, 19]]


def test_stream_takes_num_samples():
    endless = tf.data.Dataset.range(5).map(lambda n: (n, n)).repeat()
    with pytest.raises(UsageError, match="needs num_samples"):
        Stream(endless)
    source = Stream(endless, num_samples=7)
    plan = SamplePlan(num_samples=7, batch_size=7, shuffle=False)
    assert drawn(source, plan, 2) == [([0, 1, 2, 3, 4, 0, 1], 1.0)] * 2
    assert stream(9, num_samples=4).num_samples == 4
    with pytest.raises(UsageError, match="Received: 10 of 9"):
        stream(9, num_samples=10)
    with pytest.raises(DataError, match="at least one sample"):
        stream(0)


@pytest.mark.parametrize("change", [-1, 1])
def test_stream_that_changes_its_length_is_an_error(change):
    length = tf.Variable(8, dtype=tf.int64)
    source = Stream(tf.data.Dataset.range(100).take_while(lambda n: n < length).map(lambda n: (n, n)))
    length.assign_add(change)
    with pytest.raises(tf.errors.FailedPreconditionError, match="expected to contain 8"):
        drawn(source, SamplePlan(num_samples=8, batch_size=4, shuffle=False), 3)


def test_stream_transforms_only_its_share():
    calls = []

    def note(n):
        calls.append(int(n))
        return n * 10

    def transform(n, y):
        return tf.ensure_shape(tf.numpy_function(note, [n], tf.int64), []), y, 0.5

    source = stream(8, transform=transform)
    calls.clear()
    plan = SamplePlan(num_samples=8, batch_size=2, rank=1, size=2, shuffle=False, remainder="drop")
    assert drawn(source, plan, 2) == [([20, 30], 1.0), ([60, 70], 1.0)]
    assert not {0, 1, 4, 5} & set(calls)


def test_stream_requires_its_order_and_structure():
    with pytest.raises(UsageError, match="shuffle=False"):
        training_dataset(stream(4), SamplePlan(num_samples=4, batch_size=2))
    with pytest.raises(UsageError, match="samples must be"):
        Stream(tf.data.Dataset.zip(*[tf.data.Dataset.range(4)] * 4))
    varying = tf.data.Dataset.range(1, 5).map(lambda n: ({"text": tf.fill([n], "a")}, n))
    source = Stream(varying, transform=lambda x, y: (tf.strings.reduce_join(x["text"]), y))
    plan = SamplePlan(num_samples=4, batch_size=4, shuffle=False)
    assert drawn(source, plan, 1) == [([b"a", b"aa", b"aaa", b"aaaa"], 1.0)]


def test_facts_detect_a_shuffle_without_a_seed():
    dataset = tf.data.Dataset.range(1000).map(lambda n: (n, n))
    assert Stream(dataset).facts() == Stream(dataset).facts()
    assert Stream(dataset.shuffle(1000, seed=1)).facts() == Stream(dataset.shuffle(1000, seed=1)).facts()
    assert Stream(dataset.shuffle(1000)).facts() != Stream(dataset.shuffle(1000)).facts()


def test_input_prints_nothing(capfd):
    """The graph optimizer warns about some forms of map on stderr, from C++."""
    sources = [numbered(9), numbered(9, augment=noise), stream(9, transform=lambda x, y: (x, y))]
    tf.constant(0)  # TensorFlow prints a message on first use
    capfd.readouterr()
    for source in sources:
        plan = SamplePlan(num_samples=9, batch_size=2, shuffle=not source.keeps_order)
        assert len(drawn(source, plan, 9)) == 9
        assert len(list(evaluation_dataset(source, 4, 0, 1))) == 3
    assert capfd.readouterr() == ("", "")
