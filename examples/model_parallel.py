"""A model on two devices per rank, with gradients averaged over ranks: (hvd) marks the distributed lines.

launch/run horovodrun -np 2 python examples/model_parallel.py

Here the devices are two logical CPUs, so that the example runs anywhere.
"""

from hvdtrain import DistributedOptimizer, broadcast, init, verify  # (hvd) before TensorFlow, to silence its messages

# isort: split
import tensorflow as tf

(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
topology = init(seed=1)  # (hvd) starts Horovod

import keras
from keras import layers
from sklearn.datasets import load_digits

BATCH_SIZE = 32  # per rank
STEPS = 300
FIRST, SECOND = "CPU:0", "CPU:1"

digits = load_digits()
images, labels = digits.images[..., None].astype("float32") / 16, digits.target
test_images, test_labels = images[:360], labels[:360]
samples = tf.data.Dataset.from_tensor_slices((images[360:], labels[360:])).shuffle(len(images), seed=1).repeat()
# (hvd) all ranks shuffle alike and each takes every n-th sample, so that a step sees the same samples as one process
samples = samples.shard(topology.size, topology.rank)


class Split(keras.Model):
    """Convolutions on one device, dense layers on the other."""

    def __init__(self):
        super().__init__()
        with tf.device(FIRST):
            self.front = keras.Sequential(
                [
                    layers.Input((8, 8, 1)),
                    layers.Conv2D(32, 3, padding="same", activation="relu"),
                    layers.MaxPooling2D(),
                    layers.Flatten(),
                ]
            )
        with tf.device(SECOND):
            self.back = keras.Sequential([layers.Input((512,)), layers.Dense(64, activation="relu"), layers.Dense(10)])

    def call(self, images):
        with tf.device(FIRST):
            features = self.front(images)
        with tf.device(SECOND):
            return self.back(features)


model = Split()
model(test_images[:1])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = DistributedOptimizer(keras.optimizers.Adam(2e-3))  # (hvd) averages the gradients
model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
broadcast(model)  # (hvd) all ranks start with rank 0's weights


@tf.function
def train_step(images, labels):
    with tf.GradientTape() as tape:
        value = loss(labels, model(images, training=True))
    optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)


# (hvd) compares a step of all ranks with that of one process, and puts everything back
verify(lambda batch: train_step(*batch), next(iter(samples.batch(BATCH_SIZE))), model)
for images, labels in samples.batch(BATCH_SIZE).take(STEPS):
    train_step(images, labels)

if topology.rank == 0:  # (hvd) only rank 0 prints
    for variable in model.trainable_variables:
        print(f"{variable.path} on {variable.value.device[-5:]}")
    _, accuracy = model.evaluate(test_images, test_labels, verbose=0)
    print(f"test accuracy {accuracy:.3f} after training on {topology.size} rank(s)")
