"""A distributed Keras script: (hvd) marks the lines that make it distributed.

launch/run horovodrun -np 2 python examples/keras_fit.py
"""

import hvdtrain  # (hvd) before TensorFlow, to silence its start-up messages

topology = hvdtrain.init(seed=1)  # (hvd) starts Horovod; assigns each rank a GPU and a share of the cores

import keras
from keras import layers
from sklearn.datasets import load_digits

BATCH_SIZE = 32  # per rank
EPOCHS = 12

digits = load_digits()
images, labels = digits.images[..., None].astype("float32") / 16, digits.target
test_images, test_labels = images[:360], labels[:360]
images, labels = images[360:], labels[360:]

images, labels = hvdtrain.shard(images, labels)  # (hvd) this rank's part; equal numbers of steps on all ranks

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
)
hvdtrain.broadcast(model)  # (hvd) all ranks start with rank 0's weights

callbacks = hvdtrain.callbacks.distributed(  # (hvd) all ranks decide the same; rank 0 shows the progress
    [keras.callbacks.ReduceLROnPlateau("loss", patience=2)]
)
model.fit(images, labels, batch_size=BATCH_SIZE, epochs=EPOCHS, verbose=2, callbacks=callbacks)
if topology.rank == 0:  # (hvd) only rank 0 saves and prints
    _, accuracy = model.evaluate(test_images, test_labels, verbose=0)
    print(f"test accuracy {accuracy:.3f} after training on {topology.size} rank(s)")
