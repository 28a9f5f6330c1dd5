"""On all ranks: collectives on values of the user's own, and variables that belong to no model."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import SHARED_GPUS, samples

import hvdtrain
from hvdtrain.errors import DisagreementError, DivergenceError, UsageError

TOPOLOGY = hvdtrain.init(seed=0, gpus=SHARED_GPUS)
RANK, SIZE = TOPOLOGY.rank, TOPOLOGY.size
RANKS = np.arange(SIZE)


@pytest.mark.parametrize(
    ("op", "expected"),
    [("mean", np.mean(RANKS + 1)), ("sum", np.sum(RANKS + 1)), ("min", 1), ("max", SIZE)],
)
def test_reduction(op, expected):
    own = RANK + 1
    values = {
        "number": own,
        "float": float(own),
        "array": np.full((2, 3), own, np.int32),
        "nested": [tf.constant(own, tf.float64)],
    }
    found = hvdtrain.reduce(values, op)
    assert found["number"] == found["float"] == expected
    assert isinstance(found["float"], float)
    np.testing.assert_array_equal(found["array"], np.full((2, 3), expected))
    np.testing.assert_array_equal(found["nested"][0], expected)


def test_reduction_of_bits_and_nothing():
    assert hvdtrain.reduce(True, "sum") == SIZE
    assert hvdtrain.reduce([]) == []


def test_what_cannot_be_reduced():
    with pytest.raises(UsageError, match=r"op must be mean, sum, min or max. Received: 'product'"):
        hvdtrain.reduce(1, "product")
    with pytest.raises(UsageError, match=r"reduce needs numbers. Received: str. .* hvdtrain\.gather_objects"):
        hvdtrain.reduce("text")
    if SIZE > 1:
        with pytest.raises(DisagreementError, match=r"values of hvdtrain\.reduce"):
            hvdtrain.reduce(np.zeros(RANK + 1))
    with pytest.raises(Exception, match=r"UsageError: .*Use hvdtrain\.average there"):
        tf.function(lambda: hvdtrain.reduce(1))()


def test_objects():
    assert hvdtrain.gather_objects({"rank": RANK}) == [{"rank": rank} for rank in range(SIZE)]
    assert hvdtrain.broadcast_object(RANK, root_rank=SIZE - 1) == SIZE - 1
    assert hvdtrain.broadcast_object("text" if RANK == 0 else None) == "text"
    with pytest.raises(UsageError, match="root_rank must be a rank, from 0 to"):
        hvdtrain.broadcast_object(1, root_rank=SIZE)
    hvdtrain.barrier()


def test_the_main_process(capsys):
    assert hvdtrain.is_main_process() == (RANK == 0)
    hvdtrain.print_once("epoch", 1, sep="-")
    assert capsys.readouterr().out == ("epoch-1\n" if RANK == 0 else "")


def test_broadcast_of_variables_and_modules():
    class Module(tf.Module):
        def __init__(self):
            super().__init__()
            self.weight = tf.Variable(float(RANK))
            self.parts = [tf.Variable([RANK, RANK])]

    module = Module()
    hvdtrain.broadcast(module)
    assert float(module.weight) == 0
    assert module.parts[0].numpy().tolist() == [0, 0]
    variables = [keras.Variable(float(RANK)), tf.Variable(float(RANK))]
    hvdtrain.broadcast(variables)
    assert [float(each) for each in variables] == [0, 0]
    with pytest.raises(UsageError, match=r"Received: builtins\.dict\.$"):
        hvdtrain.broadcast({})


def test_variables_of_tensorflow_are_trained():
    x, _ = samples(8 * SIZE)
    target = x @ np.arange(6, dtype=np.float32)[:, None]

    def train(part, optimizer):
        weight = tf.Variable(np.zeros((6, 1), np.float32))
        for _ in range(3):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((x[part] @ weight - target[part]) ** 2)
            optimizer.apply([tape.gradient(loss, weight)], [weight])
        return weight.numpy()

    ours = train(slice(RANK, None, SIZE), hvdtrain.DistributedOptimizer(keras.optimizers.Adam(0.1)))
    np.testing.assert_allclose(ours, train(slice(None), keras.optimizers.Adam(0.1)), rtol=1e-5)


@pytest.mark.skipif(SIZE == 1, reason="one rank is equal to itself")
def test_different_variables_of_tensorflow_are_refused():
    weight = tf.Variable(float(RANK), name="own")
    optimizer = hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.1))
    with pytest.raises(DivergenceError, match=r"variable 'own:0' of ranks? 1"):
        optimizer.apply([tf.constant(1.0)], [weight])


def test_a_variable_that_is_no_weight_is_reported(capfd):
    class Scale(keras.layers.Layer):
        def __init__(self):
            super().__init__(name="scale")
            self.factor = tf.Variable(1.0)

        def call(self, x):
            return x * self.factor

    model = keras.Sequential([keras.layers.Input((6,)), Scale(), keras.layers.Dense(1)])
    model.compile(hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    hvdtrain.broadcast(model)
    said = "layer 'scale' keeps a tf.Variable as 'factor', which is no weight of the model"
    assert (said in capfd.readouterr().err) == (RANK == 0 and SIZE > 1)


def test_a_model_that_build_leaves_without_weights_is_refused():
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            return self.dense(x)

    model = Model()
    model.compile(hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    model.build((None, 3))
    with pytest.raises(UsageError, match="must be built before its variables are broadcast"):
        hvdtrain.broadcast(model)
    model(np.ones((1, 3)))
    hvdtrain.broadcast(model)
