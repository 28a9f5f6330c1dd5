"""A custom task: a file with four fields.

launch/run horovodrun -np 2 python -m hvdtrain --task examples/own_task.py
"""

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_breast_cancer

import hvdtrain
from hvdtrain.data import Arrays, Data


def read_data(data_dir):
    table = load_breast_cancer()
    x = ((table.data - table.data.mean(0)) / table.data.std(0)).astype("float32")
    order = np.random.default_rng(0).permutation(len(x))
    test, training = order[:100], order[100:]
    return Data(Arrays(x[training], table.target[training]), Arrays(x[test], table.target[test]))


def make_model(data):
    return keras.Sequential([layers.Input((30,)), layers.Dense(16, activation="relu"), layers.Dense(1, "sigmoid")])


TASK = hvdtrain.Task(
    model=make_model,
    data=read_data,
    loss="binary_crossentropy",
    metrics=lambda: ["accuracy"],
    optimizer=lambda: keras.optimizers.Adam(5e-3, beta_2=0.99),
    defaults={"batch_size": 16, "epochs": 20},
)
