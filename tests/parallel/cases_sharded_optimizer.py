"""On all ranks: a sharded optimizer makes the updates of one process, and keeps 1/N of the state."""

import keras
import numpy as np
import pytest
from models import relative_difference, values
from trainings import COLLECTIVES, RANK, SIZE, alone, assert_equal_replicas, tanh_model, trained

import hvdtrain
from hvdtrain.distributed.shards import part_of

OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.05),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.01, momentum=0.9, centered=True),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.05),
    "Adadelta": lambda: keras.optimizers.Adadelta(1.0),
    "Adam": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
    "AdamW": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "Adamax": lambda: keras.optimizers.Adamax(0.01),
    "Nadam": lambda: keras.optimizers.Nadam(0.01),
    "Lion": lambda: keras.optimizers.Lion(0.001),
    "Ftrl": lambda: keras.optimizers.Ftrl(0.05),
}


def sharded(optimizer, **options):
    return hvdtrain.DistributedOptimizer(optimizer, shard_optimizer=True, **options)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_are_those_of_one_process(name):
    optimizer = OPTIMIZERS[name]
    model, _ = trained(tanh_model, sharded(optimizer()))
    reference = alone(tanh_model, optimizer())
    assert relative_difference(values(model.weights), values(reference.weights)) < 1e-6
