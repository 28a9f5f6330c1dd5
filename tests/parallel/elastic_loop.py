"""A loop of a user's own in double precision, whose ranks end themselves: FOLDER [STEP:RANK:SIGNAL …].

Rank 0 saves the final weights and how often each sample was used by the steps that count.
"""

import os
import signal
import sys
import time
from pathlib import Path

import hvdtrain

hvdtrain.elastic.init(seed=1, stall_timeout_s=60)

import keras
import numpy as np
import tensorflow as tf
from keras import layers

keras.config.set_floatx("float64")
FOLDER, EVENTS = Path(sys.argv[1]), [event.split(":") for event in sys.argv[2:]]
GLOBAL_BATCH_SIZE, STEPS, SAMPLES = 24, 300, 240

generator = np.random.default_rng(1)
x = generator.normal(size=(SAMPLES, 8))
y = np.tanh(x @ generator.normal(size=(8, 1)))
model = keras.Sequential([layers.Input((8,)), layers.Dense(16, "tanh"), layers.Dense(1)])
optimizer = hvdtrain.DistributedOptimizer(keras.optimizers.Adam(1e-2))
model.compile(optimizer=optimizer)
state = hvdtrain.elastic.State(model, step=0, used=np.zeros(SAMPLES, int))


@tf.function(reduce_retracing=True)
def train_step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)


def end_itself(ranks):
    for step, rank, name in EVENTS:
        if (int(step), int(rank)) == (state.step, ranks.rank) and ranks.size > 1:
            try:
                os.close(os.open(FOLDER / f"{step}.{rank}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            os.kill(os.getpid(), getattr(signal, name))


def train(ranks):
    while state.step < STEPS:
        order = np.random.default_rng(state.step * GLOBAL_BATCH_SIZE // SAMPLES).permutation(SAMPLES)
        start = state.step * GLOBAL_BATCH_SIZE % SAMPLES
        batch = order[start : start + GLOBAL_BATCH_SIZE]
        mine = np.array_split(batch, ranks.size)[ranks.rank]
        end_itself(ranks)
        train_step(x[mine], y[mine])
        state.used[batch] += 1
        state.step += 1
        if EVENTS:
            waits = any(int(step) > state.step and ranks.size <= max(int(rank), 1) for step, rank, _ in EVENTS)
            time.sleep(0.5 if waits else 0.01)
        state.commit()
    if ranks.rank == 0:
        np.savez(FOLDER / "weights.npz", *model.get_weights(), used=state.used)


hvdtrain.elastic.run(
    train,
    state,
    warm_up=lambda: train_step(x[:12], y[:12]),
    on_stop=lambda: np.savez(FOLDER / "stopped.npz", step=state.step),
)
