"""On all ranks: each program trains as in one process on the whole batch, or is refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from programs import ADAPTIVE_WITH_EMBEDDINGS, NUM_SAMPLES, PROGRAMS, REFUSED
from trainers import make_trainer

import hvdtrain
from hvdtrain.data import Arrays
from hvdtrain.distributed import runtime
from hvdtrain.distributed.single_process import SingleProcessCollectives
from hvdtrain.errors import UsageError

TOPOLOGY = hvdtrain.init()
RANK, SIZE = TOPOLOGY.rank, TOPOLOGY.size
COLLECTIVES = runtime.current().collectives
GLOBAL_BATCH = 16
STEPS = NUM_SAMPLES // GLOBAL_BATCH
BATCH = GLOBAL_BATCH // SIZE


class InOrder(Arrays):
    keeps_order = True


def train_alone(program):
    def wrap(optimizer):
        if program.__name__ in ADAPTIVE_WITH_EMBEDDINGS:
            return hvdtrain.DistributedOptimizer(optimizer, collectives=SingleProcessCollectives())
        return optimizer

    model, x, y = made(program, wrap)
    model.fit(x, y, GLOBAL_BATCH, shuffle=False, verbose=0)
    return model, {name: values[-1] for name, values in model.history.history.items()}


def train_with_fit(program):
    model, x, y = made(program, hvdtrain.DistributedOptimizer)
    own = np.arange(NUM_SAMPLES).reshape(STEPS, SIZE, BATCH)[:, RANK].ravel()
    hvdtrain.broadcast(model)
    model.fit(*tf.nest.map_structure(lambda each: each[own], (x, y)), BATCH, shuffle=False, verbose=0)
    return model, {}


def train_with_trainer(program):
    model, x, y = made(program, lambda optimizer: optimizer)
    last = {}
    logs = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, values: last.update(values))
    make_trainer(model, InOrder(x, y), batch_size=BATCH, steps=STEPS, callbacks=[logs]).fit()
    return model, last


WAYS = {"fit": train_with_fit, "trainer": train_with_trainer}


def made(program, wrap):
    keras.utils.set_random_seed(1)
    return program(wrap)


def weights(model):
    return [variable.numpy() for variable in model.weights]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda each: each.__name__)
def test_program(program, way):
    if program.__name__ in REFUSED:
        with pytest.raises((UsageError, tf.errors.InvalidArgumentError), match=REFUSED[program.__name__]):
            WAYS[way](program)
        return
    alone, values_alone = train_alone(program)
    initial = weights(made(program, lambda optimizer: optimizer)[0])
    model, values = WAYS[way](program)
    assert max(np.max(np.abs(a - b)) for a, b in zip(weights(alone), initial, strict=True)) > 1e-4
    for theirs in COLLECTIVES.allgather(weights(model)):
        for mine, other in zip(weights(model), theirs, strict=True):
            assert np.array_equal(mine, other)
    for ours, theirs in zip(weights(model), weights(alone), strict=True):
        assert np.max(np.abs(ours - theirs)) < 1e-4 * max(1, np.max(np.abs(theirs)))
    if way == "trainer":
        assert values == pytest.approx(values_alone, rel=1e-4, abs=1e-5)
