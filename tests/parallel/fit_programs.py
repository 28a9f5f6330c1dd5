"""Models, data and a call of model.fit for the cases of model.fit with DistributedOptimizer."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import SHARED_GPUS, dense_model, loss, samples, values

import hvdtrain
from hvdtrain.callbacks import distributed
from hvdtrain.distributed import runtime

TOPOLOGY = hvdtrain.init(seed=0, gpus=SHARED_GPUS)
RANK, SIZE = TOPOLOGY.rank, TOPOLOGY.size
COLLECTIVES = runtime.current().collectives
BATCH = 4
X, Y = samples(8 * SIZE * BATCH, seed=1)
SHARD_X, SHARD_Y = X[RANK::SIZE], Y[RANK::SIZE]
TEST_X, TEST_Y = samples(53, seed=2)
# The first rank has few of them, and all ranks have another number.
CUTS = [0, 5, *np.linspace(5, 53, SIZE).astype(int)[1:]]
TEST_SHARD = TEST_X[CUTS[RANK] : CUTS[RANK + 1]], TEST_Y[CUTS[RANK] : CUTS[RANK + 1]]


def compiled(optimizer=None, model=None, **options) -> keras.Model:
    model = model or dense_model()
    optimizer = hvdtrain.DistributedOptimizer(optimizer or keras.optimizers.SGD(0.1))
    model.compile(optimizer=optimizer, **{"loss": loss(), "metrics": ["accuracy"], **options})
    return model


def fit(callbacks, model=None, *, epochs=4, **options) -> tuple[keras.Model, dict]:
    model = model or compiled()
    if model.built:
        hvdtrain.broadcast(model)
    history = model.fit(
        options.pop("x", SHARD_X),
        options.pop("y", SHARD_Y),
        **{"batch_size": BATCH, "epochs": epochs, "verbose": 0, "validation_data": TEST_SHARD, **options},
        callbacks=callbacks,
    )
    return model, history.history


def assert_same_on_all_ranks(value) -> None:
    all_ranks = COLLECTIVES.allgather(value)
    assert all(each == all_ranks[0] for each in all_ranks), all_ranks


def digests(model) -> list[bytes]:
    return [v.tobytes() for v in values([*model.weights, *model.optimizer.variables])]


def of_unknown_length(count=None) -> tf.data.Dataset:
    spec = (tf.TensorSpec((6,)), tf.TensorSpec((), tf.int32))
    pairs = zip(SHARD_X[:count], SHARD_Y[:count], strict=True)
    dataset = tf.data.Dataset.from_generator(lambda: iter(list(pairs)), output_signature=spec)
    return dataset.cache().batch(BATCH)


WITH_AND_WITHOUT = pytest.mark.parametrize("callbacks", [distributed, list])
