"""The CIFAR-10 task of TensorFlow's multi-GPU tutorial: distorted colour images and a network with two convolutions.

Data: 60,000 images of 10 classes; A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.
Network, distortions and hyperparameters:
TensorFlow's tutorial "Convolutional Neural Networks" (models/tutorials/image/cifar10), after cuda-convnet.
"""

from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from hvdtrain.data import Arrays, Data
from hvdtrain.errors import DataError
from hvdtrain.tasks.task import DataFiles, Task

NUM_CLASSES = 10
STORED_SHAPE = (3, 32, 32)
SIDE = 24
"""Side of the network's input in pixels: a random crop in training, the central crop in evaluation."""
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

_RECORD_BYTES = 1 + int(np.prod(STORED_SHAPE))
_FILES = DataFiles("cifar10", "CIFAR-10, binary version", "https://www.cs.toronto.edu/~kriz/cifar.html")
# The penalty on the weights of the two large dense layers is 0.004 * sum(w^2) / 2.
_WEIGHT_DECAY = 0.004


def read_data(data_dir: Path | None) -> Data:
    """Reads ``data_batch_*.bin`` and ``test_batch.bin`` from anywhere below the folder."""
    training = _read(_FILES.find(data_dir, "**/data_batch_*.bin"))
    images, labels = _read(_FILES.find(data_dir, "**/test_batch.bin"))
    margin = (STORED_SHAPE[1] - SIDE) // 2
    crops = images[:, margin : margin + SIDE, margin : margin + SIDE]
    return Data(Arrays(*training, augment=distorted), Arrays(standardised(crops), labels), NUM_CLASSES)


def _read(paths: list[Path]) -> tuple[np.ndarray, np.ndarray]:
    """Images, uint8 ``[num, 32, 32, 3]``, and labels, int32 ``[num]``.

    Raises:
        DataError: a file is truncated or contains an invalid label.
    """
    images, labels = [], []
    for path in paths:
        data = np.fromfile(path, np.uint8)
        records, rest = divmod(len(data), _RECORD_BYTES)
        if rest or not records:
            raise DataError(
                f"CIFAR-10 files must consist of records of {_RECORD_BYTES} bytes. Received: {path}, which has {rest} "
                f"bytes at offset {records * _RECORD_BYTES}. Download the file again."
            )
        table = data.reshape(records, _RECORD_BYTES)
        if wrong := np.flatnonzero(table[:, 0] >= NUM_CLASSES).tolist():
            raise DataError(
                f"CIFAR-10 labels must be 0 to {NUM_CLASSES - 1}. Received: {table[wrong[0], 0]} at offset "
                f"{wrong[0] * _RECORD_BYTES} of {path} (image {wrong[0]}). Is it the binary version?"
            )
        images.append(table[:, 1:].reshape(-1, *STORED_SHAPE).transpose(0, 2, 3, 1))
        labels.append(table[:, 0].astype(np.int32))
    return np.concatenate(images), np.concatenate(labels)


def standardised(images: np.ndarray) -> np.ndarray:
    """Scales each image to mean 0 and variance 1, like ``tf.image.per_image_standardization``; float32."""
    images = images.astype(np.float32)
    axes = tuple(range(1, images.ndim))
    deviation = images.std(axis=axes, keepdims=True)
    smallest = 1 / np.sqrt(np.prod(images.shape[1:]))
    return (images - images.mean(axis=axes, keepdims=True)) / np.maximum(deviation, smallest).astype(np.float32)


def distorted(image: tf.Tensor, label: tf.Tensor, seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Augments a training image: random crop, flip, brightness and contrast."""
    seeds = tf.unstack(tf.random.experimental.stateless_split(seed, 4))
    image = tf.image.stateless_random_crop(tf.cast(image, tf.float32), (SIDE, SIDE, 3), seeds[0])
    image = tf.image.stateless_random_flip_left_right(image, seeds[1])
    image = tf.image.stateless_random_brightness(image, 63, seeds[2])
    image = tf.image.stateless_random_contrast(image, 0.2, 1.8, seeds[3])
    return tf.image.per_image_standardization(image), label


def local_response_normalisation(x: keras.KerasTensor) -> keras.KerasTensor:
    """``x / (1 + 0.001 / 9 * sum of squares over 9 neighbouring channels) ** 0.75``, channels last.

    Source: Krizhevsky et al., "ImageNet Classification with Deep Convolutional Neural Networks", 2012, section 3.3.
    Uses only Keras operations, so that a saved model can be loaded without hvdtrain.
    """
    channels = np.arange(x.shape[-1])
    neighbours = (np.abs(channels[:, None] - channels) <= 4).astype(np.float32)
    squares = keras.ops.matmul(keras.ops.square(x), neighbours)
    return x / keras.ops.power(1.0 + 0.001 / 9 * squares, 0.75)


def make_model(data: Data | None = None) -> keras.Model:
    """1,068,298 parameters."""

    def convolution(bias: float, name: str) -> layers.Layer:
        return layers.Conv2D(
            64,
            5,
            padding="same",
            activation="relu",
            kernel_initializer=keras.initializers.TruncatedNormal(stddev=0.05),
            bias_initializer=keras.initializers.Constant(bias),
            name=name,
        )

    def dense(units: int, name: str) -> layers.Layer:
        return layers.Dense(
            units,
            activation="relu",
            kernel_initializer=keras.initializers.TruncatedNormal(stddev=0.04),
            bias_initializer=keras.initializers.Constant(0.1),
            kernel_regularizer=keras.regularizers.L2(_WEIGHT_DECAY / 2),
            name=name,
        )

    images = keras.Input((SIDE, SIDE, 3))
    x = convolution(0.0, "conv1")(images)
    x = layers.MaxPooling2D(3, 2, padding="same", name="pool1")(x)
    x = local_response_normalisation(x)
    x = convolution(0.1, "conv2")(x)
    x = local_response_normalisation(x)
    x = layers.MaxPooling2D(3, 2, padding="same", name="pool2")(x)
    x = layers.Flatten()(x)
    x = dense(384, "local3")(x)
    x = dense(192, "local4")(x)
    logits = layers.Dense(
        NUM_CLASSES, kernel_initializer=keras.initializers.TruncatedNormal(stddev=1 / 192), name="softmax_linear"
    )(x)
    return keras.Model(images, logits, name="cifar10")


def make_sample_data(folder: Path) -> None:
    """Writes five training files and one test file, 200 images each; every class has its own mean colour."""
    rng = np.random.default_rng(0)
    angles = 2 * np.pi * np.arange(NUM_CLASSES) / NUM_CLASSES
    colours = 60 * np.stack([np.cos(angles), np.cos(angles - 2), np.cos(angles + 2)], axis=1)
    for name in (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"):
        labels = rng.permutation(np.arange(200) % NUM_CLASSES)
        noise = rng.normal(0, 15, (200, *STORED_SHAPE))
        images = np.clip(128 + colours[labels][:, :, None, None] + noise, 0, 255).astype(np.uint8)
        records = np.concatenate([labels[:, None].astype(np.uint8), images.reshape(200, -1)], axis=1)
        (folder / name).write_bytes(records.tobytes())


TASK = Task(
    model=make_model,
    data=read_data,
    loss=lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=lambda: [keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
    optimizer="sgd",
    defaults={
        "learning_rate": 0.1,
        "lr_decay": "exponential",
        "lr_decay_rate": 0.1,
        "lr_decay_epochs": 350,
        "ema": 0.9999,
        "ema_ramp": True,
        "batch_size": 128,
        "steps": 100_000,
        "log_every": 10,
        "histograms_every": 100,
        "checkpoint_every": 1000,
    },
    make_sample_data=make_sample_data,
)
