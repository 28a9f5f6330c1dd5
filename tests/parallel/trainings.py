"""Small training runs that the cases share: by the trainer on all ranks, and by plain Keras on the whole batch."""

import contextlib
import functools
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from models import NUM_CLASSES, SHARED_GPUS, loss, samples, values
from one_process import train_alone
from trainers import make_trainer

import hvdtrain
from hvdtrain.data import Arrays
from hvdtrain.distributed import runtime
from hvdtrain.loggers.reporter import Reporter

TOPOLOGY = hvdtrain.init(seed=0, deterministic=True, gpus=SHARED_GPUS)
RANK, SIZE = TOPOLOGY.rank, TOPOLOGY.size
COLLECTIVES = runtime.current().collectives
GLOBAL_BATCH = 32
STEPS = 24
# 245 = 7 * 32 + 21: the samples of the last step of an epoch cannot be divided equally among ranks.
X, Y = samples(245, seed=1)


def assert_equal_replicas(model: keras.Model) -> None:
    mine = values(model.weights) + values(model.optimizer.variables)
    for theirs in COLLECTIVES.allgather(mine):
        assert all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))


def equal_on_all_ranks(arrays) -> bool:
    all_ranks = COLLECTIVES.allgather(arrays)
    return all(np.array_equal(a, b) for other in all_ranks for a, b in zip(arrays, other, strict=True))


class Warnings(Reporter):
    """Collects what is reported as a warning."""

    def __init__(self):
        self.received: list[tuple[int, str]] = []

    def warned(self, step, text):
        self.received.append((step, text))


def tanh_model() -> keras.Model:
    return keras.Sequential([layers.Input((6,)), layers.Dense(16, activation="tanh"), layers.Dense(NUM_CLASSES)])


def batchnorm_model() -> keras.Model:
    return keras.Sequential(
        [
            layers.Input((6,)),
            layers.Dense(16, use_bias=False),  # a bias would have no effect: its gradient would be rounding errors
            layers.BatchNormalization(momentum=0.9),
            layers.Activation("tanh"),
            layers.Dense(NUM_CLASSES),
        ]
    )


def regularized_model() -> keras.Model:
    l2 = keras.regularizers.L2(0.05)
    dense = layers.Dense(16, activation="tanh", kernel_regularizer=l2)
    return keras.Sequential([layers.Input((6,)), dense, layers.Dense(NUM_CLASSES)])


def compiled(make_model, optimizer, seed: int = 100, metrics: Sequence[str] = ("accuracy",)) -> keras.Model:
    keras.utils.set_random_seed(seed)
    model = make_model()
    model.compile(optimizer=optimizer, loss=loss(), metrics=list(metrics))
    return model


def trained(make_model, optimizer, source=None, **options) -> tuple[keras.Model, dict]:
    # Different initial weights on each rank: the broadcast makes them equal.
    model = compiled(make_model, optimizer, seed=100 + RANK)
    accumulation = options.get("gradient_accumulation_steps", 1)
    arguments = {"batch_size": GLOBAL_BATCH // SIZE // accumulation, "steps": STEPS, "seed": 5, **options}
    return model, make_trainer(model, source or Arrays(X, Y), **arguments).fit()


def alone(make_model, optimizer, *, shuffle: bool = True) -> keras.Model:
    model = compiled(make_model, optimizer, metrics=())
    train_alone(model, X, Y, global_batch=GLOBAL_BATCH, seed=5, steps=STEPS, shuffle=shuffle)
    model.optimizer.finalize_variable_values(model.trainable_variables)  # as model.fit does at its end
    return model


@functools.cache
def weights_alone(make_model, make_optimizer, *, shuffle: bool = True, **options) -> list[np.ndarray]:
    """The weights after a training in one process; trained once for all cases with these arguments."""
    return values(alone(make_model, make_optimizer(**options), shuffle=shuffle).weights)


@contextlib.contextmanager
def dtype_policy(name: str):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def write_records(folder) -> list[str]:
    """The samples in three files of different lengths, one of them compressed; rank 0 writes them for all."""
    paths = [str(folder / f"part-{i}.tfrecord{'.gz' if i == 1 else ''}") for i in range(3)]
    if RANK == 0:
        for i, (first, last) in enumerate(((0, 100), (100, 107), (107, len(X)))):
            with tf.io.TFRecordWriter(paths[i], tf.io.TFRecordOptions("GZIP" if i == 1 else "")) as writer:
                for x, y in zip(X[first:last], Y[first:last], strict=True):
                    features = {
                        "x": tf.train.Feature(float_list=tf.train.FloatList(value=x)),
                        "y": tf.train.Feature(int64_list=tf.train.Int64List(value=[y])),
                    }
                    example = tf.train.Example(features=tf.train.Features(feature=features))
                    writer.write(example.SerializeToString())
    COLLECTIVES.barrier()
    return paths


def parse(serialized):
    parsed = tf.io.parse_single_example(
        serialized, {"x": tf.io.FixedLenFeature([6], tf.float32), "y": tf.io.FixedLenFeature([], tf.int64)}
    )
    return parsed["x"], tf.cast(parsed["y"], tf.int32)
