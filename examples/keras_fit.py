"""A Keras script made distributed: every line that is new is marked with (hvd).

launch/run horovodrun -np 2 python examples/keras_fit.py
"""

import hvdtrain  # (hvd) before TensorFlow, so that its start is quiet

topology = hvdtrain.init(seed=1)  # (hvd) starts Horovod; one GPU and a share of the cores for each rank

import keras
from keras import layers
from sklearn.datasets import load_digits

BATCH_SIZE = 32  # of each rank
EPOCHS = 12

digits = load_digits()
images, labels = digits.images[..., None].astype("float32") / 16, digits.target
test_images, test_labels = images[:360], labels[:360]
images, labels = images[360:], labels[360:]

# (hvd) every rank trains on its own part; equal parts, so that all make the same number of steps
usable = len(images) // topology.size * topology.size
images, labels = images[topology.rank : usable : topology.size], labels[topology.rank : usable : topology.size]

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
optimizer = keras.optimizers.Adam(2e-3)
optimizer = hvdtrain.DistributedOptimizer(optimizer)  # (hvd) gradients are averaged over all ranks
model.compile(
    optimizer=optimizer,
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
    jit_compile=False,  # (hvd) Horovod's operations cannot be compiled by XLA
)
hvdtrain.broadcast(model)  # (hvd) rank 0's initial weights for everyone

is_first = topology.rank == 0  # (hvd) one rank prints and saves
model.fit(images, labels, batch_size=BATCH_SIZE, epochs=EPOCHS, verbose=2 if is_first else 0)
if is_first:
    _, accuracy = model.evaluate(test_images, test_labels, verbose=0)
    print(f"test accuracy {accuracy:.3f} after training on {topology.size} rank(s)")
