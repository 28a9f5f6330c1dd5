"""The digits with a smooth network: near ReLU's kink, rounding differences would grow too large to compare runs."""

import keras
from keras import layers

import hvdtrain
from hvdtrain.tasks import digits


def model(data: hvdtrain.data.Data) -> keras.Model:
    return keras.Sequential(
        [layers.Input((8, 8, 1)), layers.Flatten(), layers.Dense(64, activation="tanh"), layers.Dense(10)]
    )


TASK = hvdtrain.Task(
    model=model,
    data=digits.read_data,
    loss=lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    optimizer="momentum",
    defaults={"learning_rate": 0.05},
)
