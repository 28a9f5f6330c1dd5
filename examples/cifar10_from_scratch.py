"""The CIFAR-10 tutorial of the parts: reader, plan, optimizer, checkpoints; (hvd) marks what several ranks need.

launch/run horovodrun -np 2 python examples/cifar10_from_scratch.py [folder with CIFAR-10's binary files]

Without a folder it trains on generated files for a minute.
"""

import sys
import tempfile
from pathlib import Path

import hvdtrain  # (hvd) before TensorFlow, so that its start is quiet

topology = hvdtrain.init(seed=1)  # (hvd) starts Horovod; one GPU and a share of the cores for each rank

import keras
import tensorflow as tf

from hvdtrain import runtime
from hvdtrain.data import training_dataset
from hvdtrain.sampling import SamplePlan
from hvdtrain.tasks import cifar10

collectives = runtime.current().collectives
folder = Path(collectives.allgather(tempfile.mkdtemp())[0])  # (hvd) rank 0's
data_dir, steps = (Path(sys.argv[1]), 100_000) if len(sys.argv) > 1 else (folder, 100)
if data_dir == folder and topology.rank == 0:  # (hvd) one rank writes
    cifar10.make_sample_data(folder)
collectives.barrier()  # (hvd) the others wait for it

data = cifar10.read_data(data_dir)
plan = SamplePlan(  # (hvd) one global order of samples; this rank's part of each global batch
    num_samples=data.training.num_samples, batch_size=64, rank=topology.rank, size=topology.size, seed=1
)
model = cifar10.make_model()
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
rate = keras.optimizers.schedules.ExponentialDecay(0.1, 350 * plan.steps_per_epoch, 0.1, staircase=True)
optimizer = hvdtrain.DistributedOptimizer(keras.optimizers.SGD(rate))  # (hvd) averages the gradients
model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
hvdtrain.broadcast(model)  # (hvd) rank 0's initial weights for everyone
checkpointer = hvdtrain.Checkpointer(folder / "checkpoints", model)  # (hvd) rank 0 writes, every rank gets it back


@tf.function
def train_step(batch, factor):
    images, labels = batch
    with tf.GradientTape() as tape:
        value = loss(labels, model(images, training=True)) + sum(model.losses)
        scaled = factor * value  # (hvd) a short last step is shared out unevenly
    optimizer.apply(tape.gradient(scaled, model.trainable_variables), model.trainable_variables)
    return value


for step, batch in enumerate(training_dataset(data.training, plan).take(steps), start=1):
    value = train_step(*batch)
    if step % 10 == 0 and topology.rank == 0:  # (hvd) one rank prints
        print(f"step {step} loss {float(value):.3f}", flush=True)
    if step % 1000 == 0 or step == steps:
        checkpointer.save(step, wait=step == steps)

if topology.rank == 0:  # (hvd)
    _, accuracy = model.evaluate(data.evaluation.x, data.evaluation.y, verbose=0)
    print(f"test accuracy {accuracy:.3f} after training on {topology.size} rank(s)")
