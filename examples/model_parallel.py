"""The layers of one model on two devices of a rank, and its gradients averaged over ranks: (hvd) marks what is new.

launch/run horovodrun -np 2 python examples/model_parallel.py

The devices are two logical CPUs here, so that it runs anywhere.
"""

import hvdtrain  # (hvd) before TensorFlow, so that its start is quiet

# isort: split
import tensorflow as tf

(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
topology = hvdtrain.init(seed=1)  # (hvd) starts Horovod

import keras
from keras import layers

from hvdtrain.data import training_dataset
from hvdtrain.sampling import SamplePlan
from hvdtrain.tasks import digits

STEPS = 300
FIRST, SECOND = "CPU:0", "CPU:1"

data = digits.read_data(None)
plan = SamplePlan(  # (hvd) one global order of samples; this rank's part of each global batch
    num_samples=data.training.num_samples, batch_size=32, rank=topology.rank, size=topology.size, seed=1
)


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
model(data.training.x[:1])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = hvdtrain.DistributedOptimizer(keras.optimizers.Adam(2e-3))  # (hvd) averages the gradients
model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
hvdtrain.broadcast(model)  # (hvd) rank 0's initial weights for everyone


@tf.function
def train_step(batch, factor):
    images, labels = batch
    with tf.GradientTape() as tape:
        value = factor * loss(labels, model(images, training=True))  # (hvd) a short last step is shared out unevenly
    optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)


for batch in training_dataset(data.training, plan).take(STEPS):
    train_step(*batch)

if topology.rank == 0:  # (hvd) one rank prints
    for variable in model.trainable_variables:
        print(f"{variable.path} on {variable.value.device[-5:]}")
    _, accuracy = model.evaluate(data.evaluation.x, data.evaluation.y, verbose=0)
    print(f"test accuracy {accuracy:.3f} after training on {topology.size} rank(s)")
