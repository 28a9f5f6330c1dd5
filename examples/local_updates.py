"""Ranks that train alone and average their parameters now and then, in a loop of one's own: (hvd) marks what is new.

launch/run horovodrun -np 2 python examples/local_updates.py
"""

import hvdtrain  # (hvd) before TensorFlow, so that its start is quiet

topology = hvdtrain.init(seed=1)  # (hvd) starts Horovod; one GPU and a share of the cores for each rank

import keras
import tensorflow as tf

from hvdtrain.tasks import digits

EPOCHS = 20

data = digits.read_data(None)
x, y = data.training.x, data.training.y
# (hvd) every rank trains on its own part; parts need not be equally large
x, y = x[topology.rank :: topology.size], y[topology.rank :: topology.size]
dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=1).batch(32)

model = digits.make_model()
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer=keras.optimizers.Adam(2e-3), loss=loss, metrics=["accuracy"])  # the plain optimizer
hvdtrain.broadcast(model)  # (hvd) rank 0's initial weights for everyone
averager = hvdtrain.ParameterAverager(model, every=8, overlap=True)  # (hvd) in the background, every 8 steps


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
averager.finish()  # (hvd) the last average; ranks may have made different numbers of steps

if topology.rank == 0:  # (hvd) one rank prints
    _, accuracy = model.evaluate(data.evaluation.x, data.evaluation.y, verbose=0)
    print(f"test accuracy {accuracy:.3f} after training on {topology.size} rank(s), {averager.rounds} averages")
