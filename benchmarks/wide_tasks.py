"""Communication-bound tasks for network benchmarks: large dense layers on few samples."""

import keras
import numpy as np
from keras import layers

import hvdtrain


def wide(width: int) -> hvdtrain.Task:
    """Three layers of ``width`` squared parameters each."""

    def model(data: hvdtrain.data.Data) -> keras.Model:
        return keras.Sequential([layers.Input((width,)), *(layers.Dense(width) for _ in range(3))])

    def data(data_dir: object) -> hvdtrain.data.Data:
        x = np.zeros((256, width), np.float32)
        return hvdtrain.data.Data(hvdtrain.data.Arrays(x, x))

    return hvdtrain.Task(
        model=model, data=data, loss="mse", optimizer="sgd", defaults={"batch_size": 4, "learning_rate": 1e-3}
    )


MB1, MB4, MB8 = wide(292), wide(592), wide(837)
