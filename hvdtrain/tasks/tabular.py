"""The tabular task: a binary classifier of five integers in TFRecord files, with histograms of its variables.

Each record is a ``tf.train.Example`` with the int64 features ``x0`` to ``x4`` and ``label``, 0 or 1.
"""

from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from hvdtrain.data import Data, TFRecords
from hvdtrain.tasks.task import DataFiles, Task

FEATURES = ("x0", "x1", "x2", "x3", "x4")
LABEL = "label"
_FILES = DataFiles("tabular", "a table of your own, with int64 features x0 to x4 and label")


def read_data(data_dir: Path | None) -> Data:
    """Reads ``train*.tfrecord*`` and ``test*.tfrecord*``, plain or GZIP."""
    parts = [_FILES.find(data_dir, f"**/{part}*.tfrecord*") for part in ("train", "test")]
    training, evaluation = (TFRecords(files, parse, batched=True) for files in parts)
    return Data(training, evaluation, 2)


def parse(records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Parses a batch to features, float32 ``[batch, 5]``, and labels, float32 ``[batch, 1]``."""
    spec = {name: tf.io.FixedLenFeature([], tf.int64) for name in (*FEATURES, LABEL)}
    columns = tf.io.parse_example(records, spec)
    label = columns[LABEL]
    is_label = tf.debugging.assert_less(
        tf.cast(label, tf.uint64), tf.constant(2, tf.uint64), message=f"{LABEL} must be 0 or 1"
    )
    with tf.control_dependencies([is_label] if is_label is not None else []):
        features = tf.stack([tf.cast(columns[name], tf.float32) for name in FEATURES], axis=1)
    return features, tf.cast(label, tf.float32)[:, tf.newaxis]


def make_model(data: Data) -> keras.Model:
    """A 5-10-1 network, 71 parameters."""
    return keras.Sequential(
        [
            layers.Input((len(FEATURES),)),
            layers.Dense(10, activation="tanh", name="hidden"),
            layers.Dense(1, name="logit"),
        ],
        name="tabular",
    )


def make_sample_data(folder: Path) -> None:
    """Writes 2,000 training records in two files and 400 test records; the label is x0 + x1 > x2 + x3."""
    rng = np.random.default_rng(0)
    for name, num in (("train-0", 1000), ("train-1", 1000), ("test", 400)):
        rows = rng.integers(-8, 9, (num, len(FEATURES)))
        labels = (rows[:, 0] + rows[:, 1] > rows[:, 2] + rows[:, 3]).astype(np.int64)
        with tf.io.TFRecordWriter(str(folder / f"{name}.tfrecord")) as writer:
            for row, label in zip(rows, labels, strict=True):
                values = dict(zip((*FEATURES, LABEL), (*row.tolist(), int(label)), strict=True))
                writer.write(_example(values).SerializeToString())


def _example(values: dict[str, int]) -> tf.train.Example:
    features = {name: tf.train.Feature(int64_list=tf.train.Int64List(value=[value])) for name, value in values.items()}
    return tf.train.Example(features=tf.train.Features(feature=features))


TASK = Task(
    model=make_model,
    data=read_data,
    loss=lambda: keras.losses.BinaryCrossentropy(from_logits=True),
    metrics=lambda: [keras.metrics.BinaryAccuracy(name="accuracy", threshold=0.0)],
    optimizer="adam",
    defaults={"learning_rate": 1e-2, "batch_size": 32, "epochs": 20, "histograms_every": 100},
    make_sample_data=make_sample_data,
)
