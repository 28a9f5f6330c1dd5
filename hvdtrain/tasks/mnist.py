"""The MNIST tasks: a small convolutional network, and softmax regression.

Data: 70,000 handwritten digits of 28x28 pixels; Y. LeCun, C. Cortes, C. Burges, "The MNIST database of handwritten
digits", which describes the IDX format.
"""

import gzip
import math
import struct
import zlib
from pathlib import Path

import keras
import numpy as np
from keras import layers

from hvdtrain.data import Arrays, Data
from hvdtrain.errors import DataError
from hvdtrain.tasks.handwritten_digits import load_digits
from hvdtrain.tasks.task import DataFiles, Task

NUM_CLASSES = 10
SIDE = 28
# Bytes: 0, 0, type (8: unsigned byte), number of dimensions.
_LABELS_MAGIC, _IMAGES_MAGIC = 0x0801, 0x0803
_FILES = DataFiles(
    "mnist", "MNIST", "http://yann.lecun.com/exdb/mnist/ (a mirror: https://github.com/cvdfoundation/mnist)"
)


def read_data(data_dir: Path | None) -> Data:
    """Reads the four IDX files, plain or gzipped, from anywhere below the folder."""
    return Data(_read(data_dir, "train"), _read(data_dir, "t10k"), NUM_CLASSES)


def _read(data_dir: Path | None, part: str) -> Arrays:
    images_path = _FILES.find(data_dir, f"**/{part}-images[-.]idx3-ubyte*")[0]
    labels_path = _FILES.find(data_dir, f"**/{part}-labels[-.]idx1-ubyte*")[0]
    images, labels = read_idx(images_path, _IMAGES_MAGIC), read_idx(labels_path, _LABELS_MAGIC)
    if images.shape[1:] != (SIDE, SIDE) or len(images) != len(labels):
        raise DataError(
            f"there must be one label for each image of {SIDE}x{SIDE} pixels. Received: images {images.shape} in "
            f"{images_path}, {len(labels)} labels in {labels_path}"
        )
    if wrong := np.flatnonzero(labels >= NUM_CLASSES).tolist():
        raise DataError(
            f"MNIST labels must be 0 to {NUM_CLASSES - 1}. Received: {labels[wrong[0]]} at offset {8 + wrong[0]} of "
            f"{labels_path}"
        )
    return Arrays((images[..., np.newaxis] / 255).astype(np.float32), labels.astype(np.int32))


def read_idx(path: Path, magic: int) -> np.ndarray:
    """The uint8 array in an IDX file, plain or gzipped.

    Raises:
        DataError: the file does not start with ``magic``, or its size does not match its header.
    """
    data = path.read_bytes()
    if path.suffix == ".gz":
        try:
            data = gzip.decompress(data)
        except (EOFError, OSError, zlib.error) as error:
            raise DataError(
                f"IDX files must be complete. Received: {path}: {error}. Download the file again."
            ) from error
    header_bytes = 4 + 4 * (magic & 0xFF)
    if len(data) < header_bytes:
        raise DataError(f"IDX headers must have {header_bytes} bytes. Received: {path}, which has {len(data)}")
    received, *shape = struct.unpack(f">{header_bytes // 4}I", data[:header_bytes])
    if received != magic:
        raise DataError(f"the file must start with the number {magic:#010x}. Received: {received:#010x} in {path}")
    expected = header_bytes + math.prod(shape)  # of Python's integers, which do not overflow
    if len(data) != expected:
        raise DataError(
            f"the file size must match the header: {expected} bytes for {'x'.join(map(str, shape))}. Received: "
            f"{len(data)} bytes in {path}. Download the file again."
        )
    return np.frombuffer(data, np.uint8, offset=header_bytes).reshape(shape)


def make_network(data: Data) -> keras.Model:
    """Two convolutions and a dense layer, 225,034 parameters."""
    return keras.Sequential(
        [
            layers.Input((SIDE, SIDE, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dropout(0.4),
            layers.Dense(NUM_CLASSES),
        ],
        name="mnist",
    )


def make_regression(data: Data) -> keras.Model:
    """Softmax regression, 7,850 parameters."""
    return keras.Sequential(
        [layers.Input((SIDE, SIDE, 1)), layers.Flatten(), layers.Dense(NUM_CLASSES)], name="mnist_softmax"
    )


def make_sample_data(folder: Path) -> None:
    """Writes handwritten digits of 8x8 pixels, scaled by 3 and centred in 28x28 pixels."""
    digits, labels = load_digits()
    large = np.kron(digits * (255 / 16), np.ones((3, 3)))
    images = np.pad(large, [(0, 0), (2, 2), (2, 2)]).astype(np.uint8)
    order = np.random.default_rng(0).permutation(len(labels))
    for part, numbers in (("train", order[360:]), ("t10k", order[:360])):
        for kind, magic, values in (
            ("images-idx3", _IMAGES_MAGIC, images[numbers]),
            ("labels-idx1", _LABELS_MAGIC, labels[numbers]),
        ):
            header = struct.pack(f">{1 + values.ndim}I", magic, *values.shape)
            packed = gzip.compress(header + values.tobytes(), mtime=0)
            (folder / f"{part}-{kind}-ubyte.gz").write_bytes(packed)


def _loss() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _metrics() -> list[keras.metrics.Metric]:
    return [keras.metrics.SparseCategoricalAccuracy(name="accuracy")]


CNN = Task(
    model=make_network,
    data=read_data,
    loss=_loss,
    metrics=_metrics,
    optimizer="adam",
    defaults={"learning_rate": 1e-3, "batch_size": 64, "epochs": 10},
    make_sample_data=make_sample_data,
)

SOFTMAX = Task(
    model=make_regression,
    data=read_data,
    loss=_loss,
    metrics=_metrics,
    optimizer="sgd",
    defaults={"learning_rate": 0.5, "batch_size": 100, "epochs": 10},
    make_sample_data=make_sample_data,
)
