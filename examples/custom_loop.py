"""A GradientTape loop made distributed: every line that is new is marked with (hvd).

launch/run horovodrun -np 2 python examples/custom_loop.py
"""

import hvdtrain  # (hvd) before TensorFlow, so that its start is quiet

topology = hvdtrain.init(seed=1)  # (hvd) starts Horovod; one GPU and a share of the cores for each rank

import keras
import tensorflow as tf

from hvdtrain.data import evaluation_dataset, training_dataset
from hvdtrain.sampling import SamplePlan
from hvdtrain.tasks import digits

STEPS = 300

data = digits.read_data(None)
plan = SamplePlan(  # (hvd) one global order of samples; this rank's part of each global batch
    num_samples=data.training.num_samples, batch_size=32, rank=topology.rank, size=topology.size, seed=1
)
model = digits.make_model()
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = hvdtrain.DistributedOptimizer(keras.optimizers.Adam(2e-3))  # (hvd) averages the gradients
model.compile(optimizer=optimizer, loss=loss)
hvdtrain.broadcast(model)  # (hvd) rank 0's initial weights for everyone


@tf.function
def train_step(data: tuple[tf.Tensor, tf.Tensor], factor: tf.Tensor) -> tf.Tensor:
    images, labels = data
    with tf.GradientTape() as tape:
        value = factor * loss(labels, model(images, training=True))  # (hvd) a short last step is shared out unevenly
    gradients = tape.gradient(value, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)
    return value


for step, batch in enumerate(training_dataset(data.training, plan).take(STEPS), start=1):
    value = train_step(*batch)
    if step % 50 == 0 and topology.rank == 0:  # (hvd) one rank prints
        print(f"step {step} loss {float(value):.4f}")

if topology.rank == 0:  # (hvd)
    for images, labels in evaluation_dataset(data.evaluation, batch_size=360, rank=0, size=1):
        accuracy = tf.reduce_mean(keras.metrics.sparse_categorical_accuracy(labels, model(images)))
        print(f"test accuracy {float(accuracy):.3f} after training on {topology.size} rank(s)")
