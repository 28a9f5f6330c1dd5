"""The digits with a smooth network: near a kink of ReLU the last bit of a sum would decide about the third digit."""

import keras
from keras import layers

import hvdtrain
from hvdtrain.tasks import digits


def model(data: hvdtrain.tasks.Data) -> keras.Model:
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
