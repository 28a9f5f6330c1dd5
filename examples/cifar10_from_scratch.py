"""The CIFAR-10 tutorial built from parts: reader, network, loop, checkpoints; (hvd) marks the distributed lines.

launch/run horovodrun -np 2 python examples/cifar10_from_scratch.py [folder with CIFAR-10's binary files]

Without a folder it makes 100 steps on generated images. Started again, it resumes from its last checkpoint.
"""

import sys
from pathlib import Path

import hvdtrain  # (hvd) before TensorFlow, to silence its start-up messages

topology = hvdtrain.init(seed=1)  # (hvd) starts Horovod; assigns each rank a GPU and a share of the cores

import keras
import numpy as np
import tensorflow as tf
from keras import layers

BATCH_SIZE = 64  # per rank
DATA_DIR = Path(sys.argv[1]) if len(sys.argv) > 1 else None
STEPS = 100_000 if DATA_DIR else 100
CHECKPOINTS = "runs/cifar10_from_scratch"


def read(pattern):
    """Images, uint8 [num, 32, 32, 3], and labels."""
    if DATA_DIR is None:
        rng = np.random.default_rng(0)
        labels = rng.permutation(np.arange(1000) % 10)
        hues = 2 * np.pi * np.arange(10)[:, None] / 10 - [0, 2, 4]  # each class has its own mean colour
        noise = rng.normal(0, 15, (1000, 32, 32, 3))
        return np.clip(128 + 60 * np.cos(hues)[labels][:, None, None] + noise, 0, 255).astype(np.uint8), labels
    records = np.concatenate([np.fromfile(path, np.uint8) for path in sorted(DATA_DIR.rglob(pattern))])
    records = records.reshape(-1, 1 + 3 * 32 * 32)
    return records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), records[:, 0].astype(np.int64)


def distorted(number, sample):
    """Augments an image, depending only on its place in the global order: the same on any number of ranks."""
    image, label = sample
    seeds = tf.unstack(tf.random.split(tf.stack([1, tf.cast(number, tf.int32)]), 4))
    image = tf.image.stateless_random_crop(tf.cast(image, tf.float32), (24, 24, 3), seeds[0])
    image = tf.image.stateless_random_flip_left_right(image, seeds[1])
    image = tf.image.stateless_random_brightness(image, 63, seeds[2])
    image = tf.image.stateless_random_contrast(image, 0.2, 1.8, seeds[3])
    return tf.image.per_image_standardization(image), label


def normalize():
    return layers.Lambda(lambda x: tf.nn.local_response_normalization(x, 4, 1.0, 0.001 / 9, 0.75))


def normal(stddev):
    return keras.initializers.TruncatedNormal(stddev=stddev)


def dense(units):
    regularizer = keras.regularizers.L2(0.002)
    return layers.Dense(units, activation="relu", kernel_initializer=normal(0.04), kernel_regularizer=regularizer)


train_images, train_labels = read("data_batch_*.bin")
samples = tf.data.Dataset.from_tensor_slices((train_images, train_labels))
samples = samples.shuffle(len(train_images), seed=1).repeat().enumerate()
samples = samples.shard(topology.size, topology.rank)  # (hvd) all ranks shuffle alike; each takes every n-th sample
batches = samples.map(distorted, num_parallel_calls=topology.threads).batch(BATCH_SIZE).prefetch(2)

model = keras.Sequential(
    [
        layers.Input((24, 24, 3)),
        layers.Conv2D(64, 5, padding="same", activation="relu", kernel_initializer=normal(0.05)),
        layers.MaxPooling2D(3, 2, padding="same"),
        normalize(),
        layers.Conv2D(64, 5, padding="same", activation="relu", kernel_initializer=normal(0.05)),
        normalize(),
        layers.MaxPooling2D(3, 2, padding="same"),
        layers.Flatten(),
        dense(384),
        dense(192),
        layers.Dense(10, kernel_initializer=normal(1 / 192)),
    ]
)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
steps_per_epoch = len(train_images) // (BATCH_SIZE * topology.size)  # (hvd) a step trains on a batch per rank
rate = keras.optimizers.schedules.ExponentialDecay(0.1, 350 * max(1, steps_per_epoch), 0.1, staircase=True)
optimizer = hvdtrain.DistributedOptimizer(keras.optimizers.SGD(rate))  # (hvd) averages the gradients
model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
hvdtrain.broadcast(model)  # (hvd) all ranks start with rank 0's weights
identity = {"data": str(DATA_DIR)}  # a resumed run must have the same
checkpointer = hvdtrain.Checkpointer(CHECKPOINTS, model, identity=identity)  # (hvd) rank 0 writes, all ranks restore
restored = checkpointer.restore()
first_step = restored.step if restored else 0


@tf.function
def train_step(images, labels):
    with tf.GradientTape() as tape:
        value = loss(labels, model(images, training=True)) + sum(model.losses)
    optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)
    return value


for step, (images, labels) in enumerate(batches.skip(first_step).take(STEPS - first_step), start=first_step + 1):
    if step == first_step + 1:  # (hvd) compares the step with that of one process, and puts everything back
        hvdtrain.verify(lambda batch: train_step(*batch), (images, labels), model)
    value = train_step(images, labels)
    if step % 10 == 0 and topology.rank == 0:  # (hvd) only rank 0 prints
        print(f"step {step} loss {float(value):.3f}", flush=True)
    if step % 1000 == 0 or step == STEPS:
        checkpointer.save(step, wait=step == STEPS)

if topology.rank == 0:  # (hvd)
    test_images, test_labels = read("test_batch.bin")
    crops = tf.image.per_image_standardization(test_images[:, 4:28, 4:28])
    _, accuracy = model.evaluate(crops, test_labels, verbose=0)
    print(f"test accuracy {accuracy:.3f} after training on {topology.size} rank(s)")
