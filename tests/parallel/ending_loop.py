"""A loop of one's own whose last rank ends before the others, or keeps them waiting: python ending_loop.py HOW WITH."""

import os
import signal
import subprocess
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import hvdtrain

topology = hvdtrain.init(seed=1, on_unequal="ignore")
how, reduced_by = sys.argv[1:]
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
optimizer = keras.optimizers.SGD(0.1)
if reduced_by == "optimizer":
    optimizer = hvdtrain.DistributedOptimizer(optimizer)
hvdtrain.broadcast(model)
x, y = np.ones((8, 4), np.float32), np.zeros((8, 2), np.float32)


@tf.function
def step(x, y):
    with tf.GradientTape() if reduced_by == "optimizer" else hvdtrain.DistributedGradientTape() as tape:
        # Gathering is code of hvdtrain that AutoGraph must leave alone.
        predicted, y = (hvdtrain.gather(each) if reduced_by == "optimizer" else each for each in (model(x), y))
        loss = tf.reduce_mean((predicted - y) ** 2)
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return hvdtrain.average(loss)


def sleeps():
    time.sleep(9)


def reads():
    """Yields batches; the twelfth takes long."""
    for number in range(20):
        if how == "reads" and number == 12 and topology.rank == topology.size - 1:
            time.sleep(9)
        yield x, y


signature = (tf.TensorSpec(x.shape), tf.TensorSpec(y.shape))
batches = tf.data.Dataset.from_generator(reads, output_signature=signature)
for number, (x_batch, y_batch) in enumerate(batches):
    if number == 12 and topology.rank == topology.size - 1:
        if how == "raises":
            raise ValueError("no such sample")
        if how == "exits":
            sys.exit(3)
        if how == "leaves":
            break
        if how == "stops":
            subprocess.Popen(["sh", "-c", f"sleep 40; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "sleeps":
            sleeps()
    step(x_batch, y_batch)
