"""The networks of the benchmarks as tasks: python -m hvdtrain bench --task benchmarks/network_tasks.py:CNN."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import keras
import numpy as np
from networks import NETWORKS
from samples import batch

import hvdtrain

_BATCHES = 16


def network_task(name: str) -> hvdtrain.Task:
    make, batch_size = NETWORKS[name]

    def data(data_dir: object) -> hvdtrain.data.Data:
        x, y = batch(name)
        return hvdtrain.data.Data(hvdtrain.data.Arrays(np.concatenate([x] * _BATCHES), np.concatenate([y] * _BATCHES)))

    return hvdtrain.Task(
        model=lambda data: make(),
        data=data,
        loss=lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=lambda: keras.optimizers.SGD(1e-3, momentum=0.9),
        defaults={"batch_size": batch_size},
    )


CNN, MLP, LSTM, TRANSFORMER = (network_task(name) for name in ("cnn", "mlp", "lstm", "transformer"))
