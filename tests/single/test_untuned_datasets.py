"""Datasets are not autotuned, because a rank may wait for a minute when it deletes the iterator of one that is."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdtrain
from hvdtrain.data.pipeline import evaluation_dataset
from hvdtrain.data.sharding import shard_of

X, Y = np.ones((8, 2), np.float32), np.ones((8, 1), np.float32)


def is_tuned(dataset: tf.data.Dataset) -> bool | None:
    return dataset.options().autotune.enabled


@pytest.fixture
def iterated(monkeypatch):
    """The datasets of which an iterator is made."""
    datasets, make = [], tf.data.Dataset.__iter__
    monkeypatch.setattr(tf.data.Dataset, "__iter__", lambda self: datasets.append(self) or make(self))
    return datasets


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return X[:4], Y[:4]


def batches():
    for _ in range(2):
        yield X[:4], Y[:4]


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda: (X, Y), {"batch_size": 4}),
        (lambda: (tf.data.Dataset.from_tensor_slices((X, Y)).batch(4),), {}),
        (lambda: (Batches(),), {}),
        (lambda: (batches(),), {}),
    ],
    ids=["arrays", "dataset", "PyDataset", "generator"],
)
def test_fit_evaluate_and_predict(make, options, iterated):
    hvdtrain.init()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    for run in (model.fit, model.evaluate, model.predict):
        iterated.clear()
        data = make()
        run(*(data[:1] if run == model.predict else data), **options, verbose=0)
        assert {is_tuned(each) for each in iterated} == {False}


def test_a_dataset_whose_options_say_so_is_tuned(iterated):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    options = tf.data.Options()
    options.autotune.enabled = True
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4).with_options(options)
    model.fit(dataset, verbose=0)
    assert {is_tuned(each) for each in iterated} == {True}
    (sharded,) = shard_of((dataset,), 1, 2, drop_remainder=True)
    assert is_tuned(sharded)


def test_shards_and_sources(iterated):
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).filter(lambda x, y: True)
    (sharded,) = shard_of((dataset,), 1, 2, drop_remainder=True)
    assert is_tuned(sharded) is False
    source = hvdtrain.data.Stream(dataset)
    source.facts()
    assert {is_tuned(each) for each in iterated} == {False}
    assert is_tuned(evaluation_dataset(source, 4, rank=0, size=1)) is False
