"""A rank of Horovod's own elastic mode, for elastic.py: the same network, and a step's time after each step.

Its Keras state does not work with Keras 3, so that the variables are kept by its TensorFlow state.
"""

import os
import time
from pathlib import Path

import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from sklearn.datasets import load_digits

hvd.init()
digits = load_digits()
images, labels = digits.images[..., None].astype("float32") / 16, digits.target
samples = iter(tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(2000).repeat().batch(32))
model = keras.Sequential(
    [
        keras.layers.Input((8, 8, 1)),
        keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10),
    ]
)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = keras.optimizers.Adam(1e-4)
optimizer.build(model.trainable_variables)


@tf.function
def gradients_of(images, labels):
    with tf.GradientTape() as tape:
        value = loss(labels, model(images, training=True))
    return tape.gradient(value, model.trainable_variables)


@hvd.elastic.run
def train(state):
    while True:
        mine = gradients_of(*next(samples))
        averaged = [hvd.allreduce(gradient, name=f"gradient.{i}") for i, gradient in enumerate(mine)]
        optimizer.apply(averaged, model.trainable_variables)
        with Path(os.environ["ELASTIC_BENCHMARK_TIMES"], f"{os.getpid()}").open("a") as file:
            file.write(f"{time.time()} {hvd.rank()} {hvd.size()}\n")
        state.commit()


variables = [each.value for each in (*model.trainable_variables, *optimizer.variables)]
train(hvd.elastic.TensorFlowState(variables=variables))
