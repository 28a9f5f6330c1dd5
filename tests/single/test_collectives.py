"""The collectives of one process, over Horovod and without it: every operation is the identity."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdtrain
from hvdtrain.distributed import replica_consistency, runtime
from hvdtrain.distributed.collectives import Collectives
from hvdtrain.distributed.config import ReductionConfig
from hvdtrain.distributed.single_process import SingleProcessCollectives
from hvdtrain.training import metrics


@pytest.fixture(params=["Horovod", "one process"])
def collectives(request) -> Collectives:
    hvdtrain.init()
    return runtime.current().collectives if request.param == "Horovod" else SingleProcessCollectives()


def test_a_single_rank_has_rank_0(collectives):
    places = (collectives.rank, collectives.local_rank, collectives.cross_rank)
    sizes = (collectives.size, collectives.local_size, collectives.cross_size)
    assert (places, sizes) == ((0, 0, 0), (1, 1, 1))


def test_values_are_unchanged(collectives):
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


def test_dense_gradients_are_unchanged_and_sparse_ones_have_each_row_once(collectives):
    sparse = tf.IndexedSlices(tf.constant([[1.0, 2.0], [4.0, 8.0], [16.0, 32.0]]), tf.constant([5, 0, 5]), [9, 2])
    gradients = [tf.ones(2), sparse]
    dense, reduced = collectives.gradient_reducer(ReductionConfig())(gradients).gradients
    assert dense is gradients[0]
    assert reduced.indices.numpy().tolist() == [5, 0]
    assert reduced.values.numpy().tolist() == [[17, 34], [4, 8]]
    _, as_dense = collectives.gradient_reducer(ReductionConfig(sparse_as_dense=True))(gradients).gradients
    assert np.array_equal(as_dense.numpy(), tf.convert_to_tensor(sparse).numpy())


def test_optimizer_broadcast_and_metrics_work_without_horovod():
    one = SingleProcessCollectives()
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
    optimizer = hvdtrain.DistributedOptimizer(keras.optimizers.SGD(), collectives=one)
    model.compile(optimizer=optimizer, loss="mse", metrics=["mae"])
    hvdtrain.broadcast(model, collectives=one)
    logs = model.fit(np.ones((8, 3)), np.ones((8, 2)), batch_size=4, verbose=0).history
    assert metrics.reduced_results(model, one) == pytest.approx({name: values[-1] for name, values in logs.items()})
    replica_consistency.require_equal_replicas(model, one, step=2)
