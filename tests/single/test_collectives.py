"""On one process both versions of the collectives do the same: nothing to the values."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdtrain
from hvdtrain import metrics, replicas, runtime
from hvdtrain.collectives import Collectives, OneProcess
from hvdtrain.errors import UsageError


@pytest.fixture(params=["Horovod", "one process"])
def collectives(request) -> Collectives:
    hvdtrain.init()
    return runtime.current().collectives if request.param == "Horovod" else OneProcess()


def test_the_only_rank(collectives):
    places = (collectives.rank, collectives.local_rank, collectives.cross_rank)
    sizes = (collectives.size, collectives.local_size, collectives.cross_size)
    assert (places, sizes) == ((0, 0, 0), (1, 1, 1))


def test_values_stay_as_they_are(collectives):
    array = np.arange(3.0)
    (total,) = collectives.sum([array])
    assert np.array_equal(total, array)
    total[0] = 9.0
    assert array[0] == 0.0  # a copy: a caller may change what it gets
    assert collectives.allgather({"a": 1}) == [{"a": 1}]
    variable = tf.Variable([1.0, 2.0])
    collectives.broadcast([variable])
    collectives.barrier()
    assert variable.numpy().tolist() == [1.0, 2.0]
    assert bool(collectives.all_true(tf.constant(True)))
    assert not bool(collectives.all_true(tf.constant(False)))


def test_gradients_stay_as_they_are(collectives):
    options = {"name": "sgd", "op": "average", "compression": "none", "groups": None, "sparse_as_dense": False}
    gradients = [tf.ones(2), tf.IndexedSlices(tf.ones((1, 2)), tf.constant([0]))]
    dense, sparse = collectives.gradient_reducer(**options)(gradients).gradients
    assert dense is gradients[0]
    assert (sparse.values, sparse.indices) == (gradients[1].values, gradients[1].indices)
    with pytest.raises(UsageError, match="compression must be one of"):
        collectives.gradient_reducer(**{**options, "compression": "zip"})


def test_the_parts_work_without_starting_horovod():
    one = OneProcess()
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
    optimizer = hvdtrain.DistributedOptimizer(keras.optimizers.SGD(), collectives=one)
    model.compile(optimizer=optimizer, loss="mse", metrics=["mae"])
    hvdtrain.broadcast(model, collectives=one)
    logs = model.fit(np.ones((8, 3)), np.ones((8, 2)), batch_size=4, verbose=0).history
    assert metrics.reduced_results(model, one) == pytest.approx({name: values[-1] for name, values in logs.items()})
    replicas.require_equal_replicas(model, one, step=2)
