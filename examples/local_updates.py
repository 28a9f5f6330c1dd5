"""Local SGD in a custom loop, with periodic parameter averaging: (hvd) marks the lines that make it distributed.

launch/run horovodrun -np 2 python examples/local_updates.py
"""

import hvdtrain  # (hvd) before TensorFlow, to silence its start-up messages

topology = hvdtrain.init(seed=1)  # (hvd) starts Horovod; assigns each rank a GPU and a share of the cores

import keras
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits

EPOCHS = 20

digits = load_digits()
images, labels = digits.images[..., None].astype("float32") / 16, digits.target
test_images, test_labels = images[:360], labels[:360]
# (hvd) each rank trains on its own shard; shards may differ in size
x, y = images[360 + topology.rank :: topology.size], labels[360 + topology.rank :: topology.size]
dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=1).batch(32)

model = keras.Sequential(
    [
        layers.Input((8, 8, 1)),
        layers.Conv2D(32, 3, padding="same", activation="relu"),
        layers.MaxPooling2D(),
        layers.Flatten(),
        layers.Dense(64, activation="relu"),
        layers.Dense(10),
    ]
)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer=keras.optimizers.Adam(2e-3), loss=loss, metrics=["accuracy"])  # a plain optimizer
hvdtrain.broadcast(model)  # (hvd) all ranks start with rank 0's weights
config = hvdtrain.LocalSGDConfig(sync_every=8, overlap=True)  # (hvd) every 8 steps, in the background
averager = hvdtrain.ParameterAverager(model, config)  # (hvd)


@tf.function
def train_step(images, labels):
    with tf.GradientTape() as tape:
        value = loss(labels, model(images, training=True))
    model.optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)
    return value


for _ in range(EPOCHS):
    for images, labels in dataset:
        train_step(images, labels)
        averager.step(samples=len(images))  # (hvd)
averager.finish()  # (hvd) final average; ranks may have made different numbers of steps

if topology.rank == 0:  # (hvd) only rank 0 prints
    _, accuracy = model.evaluate(test_images, test_labels, verbose=0)
    print(f"test accuracy {accuracy:.3f} after training on {topology.size} rank(s), {averager.rounds} averages")
