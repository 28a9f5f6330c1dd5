"""``model.fit`` in a loop of a user's own, whose rank 1 ends itself at step 20 if it is told to: FOLDER [lost|unequal].

Each check adds a line to FOLDER/checks: the number of ranks, and what was found. Rank 0 saves the final weights.
"""

import os
import signal
import sys
import time
from pathlib import Path

import hvdtrain

hvdtrain.elastic.init(seed=1, stall_timeout_s=20)

import keras
import numpy as np
from keras import layers, ops

from hvdtrain.training.equality.step_check import StepCheck

keras.config.set_floatx("float64")
FOLDER, LOST, UNEQUAL = Path(sys.argv[1]), "lost" in sys.argv, "unequal" in sys.argv
GLOBAL_BATCH_SIZE, STEPS, STEPS_PER_EPOCH = 24, 150, 10

generator = np.random.default_rng(1)
x = generator.normal(size=(GLOBAL_BATCH_SIZE * STEPS_PER_EPOCH, 8))
y = np.tanh(x @ generator.normal(size=(8, 1)))


class CentredOverTheBatch(layers.Layer):
    def call(self, inputs):
        return inputs - ops.mean(inputs, axis=0)


class MeanOfSquares(keras.losses.Loss):
    """One number, which is compared with that of two halves of the batch in the first 100 steps and later."""

    def call(self, y_true, y_pred):
        return ops.mean(ops.square(y_true - y_pred))


class Commit(keras.callbacks.Callback):
    def __init__(self, ranks):
        super().__init__()
        self._ranks = ranks

    def on_train_batch_end(self, batch, logs=None):
        state.step += 1
        if LOST and state.step == 20 and self._ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        waits = LOST and self._ranks.size == 1
        time.sleep(0.5 if waits else 0)
        state.commit()


def noted(check, batch, run=StepCheck.run):
    finding = run(check, batch)
    if state.ranks.rank == 0:
        with (FOLDER / "checks").open("a") as file:
            print(state.ranks.size, finding.unequal or finding.unchecked or "equal", file=file)
    return finding


StepCheck.run = noted
hidden = CentredOverTheBatch() if UNEQUAL else layers.Identity()
model = keras.Sequential([layers.Input((8,)), layers.Dense(16, "tanh"), hidden, layers.Dense(1)])
model.compile(hvdtrain.DistributedOptimizer(keras.optimizers.Adam(1e-2)), MeanOfSquares())
state = hvdtrain.elastic.State(model, step=0)


def train(ranks):
    state.ranks = ranks
    while state.step < STEPS:
        batches = np.arange(len(x)).reshape(STEPS_PER_EPOCH, ranks.size, -1)
        mine = batches[state.step % STEPS_PER_EPOCH :, ranks.rank].reshape(-1)
        size = GLOBAL_BATCH_SIZE // ranks.size
        model.fit(x[mine], y[mine], size, shuffle=False, verbose=0, callbacks=[Commit(ranks)])
    if ranks.rank == 0:
        np.savez(FOLDER / "weights.npz", *model.get_weights())


hvdtrain.elastic.run(train, state, warm_up=lambda: model.fit(x[:12], y[:12], 12, verbose=0))
