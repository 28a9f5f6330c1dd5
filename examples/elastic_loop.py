"""A custom elastic loop: ranks that are killed, leave or join do not end it. (el) marks the elastic lines.

launch/run --elastic 1:3 python examples/elastic_loop.py      # and kill one of its processes
launch/run horovodrun -np 2 python examples/elastic_loop.py   # the same program in a job whose ranks do not change
"""

import hvdtrain

hvdtrain.elastic.init(seed=1)  # (el) instead of hvdtrain.init

import keras
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits

GLOBAL_BATCH_SIZE = 96
STEPS = 600

digits = load_digits()
images, labels = digits.images[..., None].astype("float32") / 16, digits.target
test_images, test_labels = images[:360], labels[:360]
samples = tf.data.Dataset.from_tensor_slices((images[360:], labels[360:])).shuffle(len(images), seed=1).repeat()

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
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = hvdtrain.DistributedOptimizer(keras.optimizers.Adam(2e-3))
model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])

state = hvdtrain.elastic.State(model, step=0)  # (el) what the ranks have in common


@tf.function(reduce_retracing=True)
def train_step(images, labels):
    with tf.GradientTape() as tape:
        value = loss(labels, model(images, training=True))
    optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)
    return value


def train(ranks):  # (el) called again whenever the ranks change
    batch_size = GLOBAL_BATCH_SIZE // ranks.size
    # All ranks draw the same global batches from the next step on, and each takes its part of them.
    batches = samples.batch(batch_size * ranks.size).skip(state.step).take(STEPS - state.step)
    for images, labels in batches:
        mine = slice(ranks.rank * batch_size, (ranks.rank + 1) * batch_size)
        value = train_step(images[mine], labels[mine])
        state.step += 1
        if state.step % 100 == 0 and ranks.rank == 0:
            print(f"step {state.step} of {STEPS} on {ranks.size} rank(s), loss {float(value):.4f}", flush=True)
        state.commit()  # (el) other ranks would continue from here
    if ranks.rank == 0:
        _, accuracy = model.evaluate(test_images, test_labels, verbose=0)
        print(f"test accuracy {accuracy:.3f} after training on {ranks.size} rank(s)")


hvdtrain.elastic.run(
    train,
    state,
    warm_up=lambda: train_step(images[:32], labels[:32]),  # (el) compiles the step before the others pause
    on_stop=lambda: model.save_weights("stopped.weights.h5"),
)
