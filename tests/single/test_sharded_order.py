"""The order of data that is sharded: what is noted of it, and when ranks have different ones."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.data import sharded_order
from hvdtrain.errors import UsageError
from hvdtrain.system import cores

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(64, 3))


@pytest.fixture(autouse=True)
def nothing_noted(monkeypatch):
    monkeypatch.setattr(sharded_order, "_orders", [])


def orders(*data) -> list:
    """What a rank has noted that has sharded this."""
    sharded_order._orders.clear()
    for each in data:
        sharded_order.note((each,))
    return sharded_order.noted()


def test_a_shuffle_without_a_seed_is_refused_before_it_is_sharded():
    dataset = tf.data.Dataset.range(9)
    sharded_order.note((dataset.shuffle(9, seed=3).batch(3),))
    shuffled = dataset.shuffle(9, seed=0).batch(3)  # The seed of TensorFlow may be set in this process.
    vars(shuffled._input_dataset).update(_seed=tf.constant(0, tf.int64), _seed2=tf.constant(0, tf.int64))
    with pytest.raises(UsageError, match="shuffled, or filtered at random, without a seed"):
        sharded_order.note((shuffled,))


def paths(folder: str, order) -> np.ndarray:
    return np.array([f"{folder}/{number % 3}/{number}.png" for number in np.arange(64)[order]])


def of_files(*arguments) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(paths(*arguments)).map(tf.strings.length)


SAME, OTHER = slice(None), slice(None, None, -1)


@pytest.mark.parametrize(
    "data",
    [
        lambda order: X[order],
        lambda order: {"x": tf.constant(X[order]), "y": None},
        lambda order: paths("/data", order),
        lambda order: tf.data.Dataset.from_tensor_slices({"x": X[order], "y": X[:, 0]}).map(lambda each: each).batch(8),
        lambda order: of_files("/data", order).interleave(lambda each: tf.data.Dataset.range(3)),
        lambda order: tf.data.TFRecordDataset(paths("/data", order)),
    ],
)
def test_orders(data):
    assert not sharded_order.differ([orders(data(SAME), X), orders(data(SAME), X)])
    assert sharded_order.differ([orders(data(SAME), X), orders(data(OTHER), X)])


def test_data_sets_that_are_repeated_by_concatenation():
    dataset = tf.data.Dataset.from_tensor_slices(X)
    for _ in range(40):
        dataset = dataset.concatenate(dataset)
    assert len(orders(dataset)[0]) == 1


def test_hosts_may_keep_files_in_different_folders():
    here, there = ([orders(kind(folder, SAME)) for kind in (paths, of_files)] for folder in ("/data", "/mnt/b"))
    assert here == there != [orders(kind("/data", OTHER)) for kind in (paths, of_files)]


@pytest.mark.parametrize(
    ("num_files", "options", "are_different"), [(9, {}, True), (9, {"cycle_length": 4}, False), (2, {}, False)]
)
def test_orders_on_hosts_with_different_numbers_of_cores(num_files, options, are_different, monkeypatch):
    def interleaved(num_cores, more):
        monkeypatch.setattr(cores, "usable_cores", lambda: num_cores)
        files = tf.data.Dataset.range(num_files).map(tf.identity)
        return orders(files.interleave(lambda each: tf.data.Dataset.range(3), **options, **more).prefetch(1))

    for more in ({}, {"num_parallel_calls": tf.data.AUTOTUNE}):
        assert not sharded_order.differ([interleaved(2, more), interleaved(2, more)])
        assert sharded_order.differ([interleaved(2, more), interleaved(8, more)]) == are_different


@pytest.mark.parametrize("kind", [tf.data.TFRecordDataset, tf.data.TextLineDataset])
def test_files_that_are_read_in_parallel_on_hosts_with_different_numbers_of_cores(kind, monkeypatch):
    def read(num_cores, num_parallel_reads):
        monkeypatch.setattr(cores, "usable_cores", lambda: num_cores)
        return orders(kind(paths("/data", SAME), num_parallel_reads=num_parallel_reads).prefetch(1))

    assert not sharded_order.differ([read(2, 4), read(8, 4)])
    assert sharded_order.differ([read(2, tf.data.AUTOTUNE), read(8, tf.data.AUTOTUNE)])


def test_ranks_that_shard_other_data_are_not_compared():
    assert not sharded_order.differ([orders(X), orders(X, X[::-1])])


class Batches(keras.utils.PyDataset):
    """Its rows may be shuffled, and augmented in several ways."""

    def __init__(self, order=SAME, *, augment=lambda x: x, size=8):
        super().__init__()
        self.x, self.augment, self.size = X[order], augment, size

    def __len__(self):
        return len(self.x) // self.size

    def __getitem__(self, index):
        rows = self.x[index * self.size : (index + 1) * self.size]
        return self.augment(rows), rows[:, :1]


class Samples:
    """A container of samples, as of Grain, whose only array is in it."""

    def __init__(self, order=SAME, *, augment=lambda x: x, size=1):
        self.x, self.augment = X[order], augment

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.augment(self.x[index : index + 1]), "y": self.x[index, 0], "weight": None}


def flipped(x):
    """As augmentation with a generator that nobody seeds."""
    return x * np.random.default_rng().choice([-1, 1], size=(len(x), 1))


def moved(x):
    return x + np.random.normal(size=x.shape)


@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("augment", [lambda x: x, flipped, moved])
@pytest.mark.parametrize("kind", [Batches, Samples])
def test_orders_of_samples_that_are_read(kind, augment, size):
    one = orders(kind(augment=augment, size=size))
    assert not sharded_order.differ([one, orders(kind(augment=augment, size=size))])
    assert sharded_order.differ([one, orders(kind(OTHER, augment=augment, size=size))])


def test_samples_that_have_other_parts_each_time_are_not_compared():
    parts = iter([1, 2] * 99)
    assert orders(Batches(augment=lambda x: [x] * next(parts), size=64)) == [[]]


def test_reading_samples_changes_no_state_of_generators():
    np.random.seed(1)
    expected = np.random.rand()
    np.random.seed(1)
    orders(Batches(augment=moved))
    assert np.random.rand() == expected


def test_the_order_after_the_first_epoch_is_noted_once():
    batches = Batches()
    before = orders(batches)
    for _ in range(2):
        batches.x = batches.x[::-1]
        sharded_order.note_end_of_epoch(batches)
    assert sharded_order.noted() == [before[0] + orders(Batches(OTHER))[0]]


def test_batches_that_cannot_be_read_yet_are_not_compared():
    def fails(x):
        raise OSError("not yet")

    broken = Batches(augment=fails)
    assert orders(broken) == [[]]
    broken.augment = moved
    sharded_order.note_end_of_epoch(broken)
    assert not sharded_order.differ([sharded_order.noted(), orders(Batches())])
