"""Trains by ``model.fit`` with a Checkpoint; a launcher starts it on all ranks.

Arguments: the folder of checkpoints; a JSON object: ``every`` as for Checkpoint, ``data`` (``arrays``, ``dataset`` or
``batches``), ``accumulate``, the micro-batches of an update, and ``fault``, a signal that the last rank receives at the
end of training batch ``at``, or None. Rank 0 writes what the run has come to into ``result`` if it ends.
"""

import json
import os
import signal
import sys
from pathlib import Path

import hvdtrain

TOPOLOGY = hvdtrain.init(seed=1)

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from keras import layers  # noqa: E402

from hvdtrain.distributed.replica_consistency import sha256_of  # noqa: E402

FOLDER, SPEC = sys.argv[1], json.loads(sys.argv[2])
RANK, SIZE = TOPOLOGY.rank, TOPOLOGY.size


class Fault(keras.callbacks.Callback):
    """Also shows that the state of a user's own callback is resumed."""

    def __init__(self):
        super().__init__()
        self.num_batches = 0
        self.losses = []

    def on_train_batch_end(self, batch, logs=None):
        self.num_batches += 1
        if self.num_batches == SPEC.get("at") and RANK == SIZE - 1:
            os.kill(os.getpid(), getattr(signal, SPEC["fault"]))

    def on_epoch_end(self, epoch, logs=None):
        self.losses.append(logs["loss"])


def decay(epoch: int, rate: float) -> float:
    return 0.9 * rate  # Not a function of the epoch alone: a second call for one epoch would show.


rng = np.random.RandomState(0)
x = rng.randn(150, 6).astype("float32")
y = (x[:, :1] > 0).astype("float32")
model = keras.Sequential(
    [
        layers.Input((6,)),
        layers.Dense(16, "relu"),
        layers.BatchNormalization(),
        layers.Dropout(0.3),
        layers.Dense(1, "sigmoid"),
    ]
)
metrics = ["accuracy", keras.metrics.AUC(name="auc")]
model.compile(
    hvdtrain.DistributedOptimizer(keras.optimizers.Adam(0.01, gradient_accumulation_steps=SPEC.get("accumulate"))),
    "binary_crossentropy",
    metrics=metrics,
)
hvdtrain.broadcast(model)
fault = Fault()
callbacks = [
    keras.callbacks.LearningRateScheduler(decay),
    keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=0.1, factor=0.5),
    keras.callbacks.EarlyStopping("loss", patience=4, min_delta=0.1),
    fault,
    hvdtrain.callbacks.Checkpoint(FOLDER, every=SPEC.get("every", "epoch")),
]
part = hvdtrain.shard(x, y)
arguments = {"x": part[0], "y": part[1], "batch_size": 12 // SIZE}
if SPEC.get("data") == "dataset":
    samples = tf.data.Dataset.from_tensor_slices(part).shuffle(50, seed=3).batch(12 // SIZE)
    arguments = {"x": samples.repeat(), "steps_per_epoch": 10} if SPEC.get("repeats") else {"x": samples}
elif SPEC.get("data") == "batches":

    class Batches(keras.utils.PyDataset):
        """Shuffled by NumPy's global generator."""

        def __init__(self):
            super().__init__()
            self.order = np.arange(len(part[0]))

        def __len__(self):
            return len(self.order) // (12 // SIZE)

        def __getitem__(self, index):
            numbers = self.order[index * (12 // SIZE) : (index + 1) * (12 // SIZE)]
            return part[0][numbers], part[1][numbers]

        def on_epoch_end(self):
            np.random.shuffle(self.order)

    arguments = {"x": Batches()}
validation = hvdtrain.shard(x[:51], y[:51], drop_remainder=False)
history = model.fit(
    **arguments,
    epochs=7,
    verbose=2,
    validation_data=validation,
    callbacks=hvdtrain.callbacks.distributed(callbacks),
)
if RANK == 0:
    found = {
        "weights": sha256_of(variable.numpy() for variable in model.weights),
        "optimizer": sha256_of(variable.numpy() for variable in model.optimizer.variables),
        "history": repr((history.epoch, sorted(history.history.items()))),
        "own": repr((fault.num_batches, fault.losses)),
        "drawn": repr((np.random.rand(), float(keras.random.uniform(())))),
    }
    Path(SPEC["result"]).write_text(json.dumps(found))
