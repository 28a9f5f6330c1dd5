"""A distributed GradientTape loop: (hvd) marks the lines that make it distributed.

launch/run horovodrun -np 2 python examples/custom_loop.py
"""

import hvdtrain  # (hvd) before TensorFlow, to silence its start-up messages

topology = hvdtrain.init(seed=1)  # (hvd) starts Horovod; assigns each rank a GPU and a share of the cores

import keras
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits

BATCH_SIZE = 32  # per rank
STEPS = 300

digits = load_digits()
images, labels = digits.images[..., None].astype("float32") / 16, digits.target
test_images, test_labels = images[:360], labels[:360]
samples = tf.data.Dataset.from_tensor_slices((images[360:], labels[360:])).shuffle(len(images), seed=1).repeat()
# (hvd) all ranks shuffle alike and each takes every n-th sample, so that a step sees the same samples as one process
samples = samples.shard(topology.size, topology.rank)

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
optimizer = hvdtrain.DistributedOptimizer(keras.optimizers.Adam(2e-3))  # (hvd) averages the gradients
model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
hvdtrain.broadcast(model)  # (hvd) all ranks start with rank 0's weights


@tf.function
def train_step(images, labels):
    with tf.GradientTape() as tape:
        value = loss(labels, model(images, training=True))
    optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)
    return value


# (hvd) compares a step of all ranks with that of one process, and puts everything back
hvdtrain.verify(lambda batch: train_step(*batch), next(iter(samples.batch(BATCH_SIZE))), model)
for step, (images, labels) in enumerate(samples.batch(BATCH_SIZE).take(STEPS), start=1):
    value = train_step(images, labels)
    if step % 50 == 0 and topology.rank == 0:  # (hvd) only rank 0 prints
        print(f"step {step} loss {float(value):.4f}", flush=True)

if topology.rank == 0:  # (hvd)
    _, accuracy = model.evaluate(test_images, test_labels, verbose=0)
    print(f"test accuracy {accuracy:.3f} after training on {topology.size} rank(s)")
