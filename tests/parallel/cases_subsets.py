"""On all ranks: some ranks average among themselves, or all ranks average some of the variables."""

import functools

import keras
import numpy as np
import pytest
from keras import layers
from models import NUM_CLASSES, SHARED_GPUS, dense_model, loss, relative_difference, samples, values

import hvdtrain
from hvdtrain.distributed import runtime
from hvdtrain.errors import UsageError

TOPOLOGY = hvdtrain.init(process_sets=True, gpus=SHARED_GPUS)
RANK, SIZE = TOPOLOGY.rank, TOPOLOGY.size
COLLECTIVES = runtime.current().collectives
BATCH, STEPS = 12, 10  # of all ranks together
X, Y = samples(STEPS * BATCH)
TOLERANCE = 1e-5


def shard(index: int, count: int) -> np.ndarray:
    """The numbers of one of ``count`` ranks' samples: its part of each step's."""
    return np.arange(len(X)).reshape(STEPS, count, -1)[:, index].ravel()


def train(model, optimizer, x, y) -> keras.Model:
    model.compile(optimizer=optimizer, loss=loss())
    model.fit(x, y, batch_size=len(y) // STEPS, shuffle=False, verbose=0)
    return model


def sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1, momentum=0.9)


@functools.cache
def weights_alone() -> list[np.ndarray]:
    """The weights after a training in one process."""
    return values(train(dense_model(), sgd(), X, Y).weights)


@pytest.mark.parametrize("ranks", [(0, 1), (2, 1), (0, 3, 1), (1, 0)])
def test_a_process_set_trains_as_one_process_and_other_ranks_alone(ranks):
    if max(ranks) >= SIZE:
        pytest.skip(f"{SIZE} ranks")
    collectives = hvdtrain.process_set(ranks)
    is_member = RANK in ranks
    assert collectives.size == (len(ranks) if is_member else 1)
    own = shard(sorted(ranks).index(RANK), len(ranks)) if is_member else slice(None)
    model = dense_model()
    optimizer = hvdtrain.DistributedOptimizer(sgd(), collectives=collectives)
    if is_member and min(ranks) != RANK:
        model.set_weights([np.zeros_like(each) for each in model.get_weights()])
    model.compile(optimizer=optimizer)
    hvdtrain.broadcast(model, collectives=collectives)
    train(model, optimizer, X[own], Y[own])
    assert relative_difference(values(model.weights), weights_alone()) < TOLERANCE


@pytest.mark.parametrize("ranks", [(0,), (0, 0), (0, SIZE), ()])
def test_process_sets_are_of_different_ranks(ranks):
    with pytest.raises(UsageError, match=r"at least two different ones from 0 to .*Received: \["):
        hvdtrain.process_set(ranks)


def branches(count: int) -> tuple[keras.Model, list[layers.Layer]]:
    """A shared layer, then one of ``count`` heads for each sample, as the second input says."""
    keras.utils.set_random_seed(7)
    x, head_weights = layers.Input((6,)), layers.Input((count,))
    hidden = layers.Dense(8, activation="tanh", name="shared")(x)
    heads = [layers.Dense(NUM_CLASSES) for _ in range(count)]
    outputs = [head(hidden) * head_weights[:, i : i + 1] for i, head in enumerate(heads)]
    model = keras.Model([x, head_weights], outputs[0] if count == 1 else layers.add(outputs))
    for head in heads:
        head.set_weights([np.full((8, NUM_CLASSES), 0.1, np.float32), np.zeros(NUM_CLASSES, np.float32)])
    return model, heads


@pytest.mark.parametrize("op", ["average", "sum"])
@pytest.mark.parametrize("as_variables", [False, True])
def test_local_layers_are_trained_by_each_rank_alone(op, as_variables):
    head_of_sample = np.zeros((len(X), SIZE), np.float32)
    for rank in range(SIZE):
        head_of_sample[shard(rank, SIZE), rank] = 1
    alone, heads = branches(SIZE)
    factor = SIZE if op == "sum" else 1  # Each rank's gradient is of a mean.
    train(alone, keras.optimizers.SGD(0.05 * factor, momentum=0.9), (X, head_of_sample), Y)

    model, (head,) = branches(1)
    local = head.weights if as_variables else [head]
    optimizer = hvdtrain.PartialDistributedOptimizer(
        keras.optimizers.SGD(0.05, momentum=0.9), local_layers=local, op=op
    )
    own = shard(RANK, SIZE)
    train(model, optimizer, (X[own], np.ones((len(own), 1), np.float32)), Y[own])
    shared, theirs = (values(each.get_layer("shared").weights) for each in (model, alone))
    assert relative_difference(shared, theirs) < TOLERANCE
    assert relative_difference(values(head.weights), values(heads[RANK].weights)) < TOLERANCE
    kernels = COLLECTIVES.allgather(head.kernel.numpy())
    assert not np.allclose(kernels[0], kernels[1])


def test_what_local_layers_cannot_be_used_with():
    layer = layers.Dense(2)
    with pytest.raises(UsageError, match="use clipnorm or clipvalue"):
        hvdtrain.PartialDistributedOptimizer(keras.optimizers.SGD(global_clipnorm=1.0), local_layers=[layer])
    with pytest.raises(UsageError, match="an optimizer with local_layers excludes op='adasum'"):
        hvdtrain.PartialDistributedOptimizer(sgd(), local_layers=[layer], op="adasum")
    with pytest.raises(UsageError, match=r"layers or variables\. Received: 'dense'"):
        hvdtrain.PartialDistributedOptimizer(sgd(), local_layers=["dense"])
