"""The recommender task: clicks from dense features and categories, whose tables are sharded over the ranks.

The files are those of the Criteo data sets, ``train*`` and ``test*`` (``.tsv`` or ``.txt``): a line for each sample,
with the label (0 or 1), 13 integers and 26 categories of 32 bits in hexadecimal, separated by tabs; any of the features
may be empty. Without files, samples are generated, with Zipf-distributed categories.

The network is a small DLRM (Naumov et al., arXiv:1906.00091).
"""

from collections.abc import Sequence
from pathlib import Path

import keras
import numpy as np
from keras import layers, ops

from hvdtrain.data import Arrays, Data
from hvdtrain.errors import DataError
from hvdtrain.layers import ShardedEmbedding
from hvdtrain.tasks.task import DataFiles, Task

NUM_DENSE, NUM_CATEGORIES = 13, 26
ROWS_PER_CATEGORY = 20_000
"""Categories are taken modulo this; the first row is for missing ones."""
WIDTH = 16
_ZIPF_EXPONENT, _NUM_FREQUENT = 1.05, 20
_FILES = DataFiles("synthetic-dlrm", "Criteo's click logs", "https://ailab.criteo.com/ressources/")


def read_data(data_dir: Path | None) -> Data:
    """Reads ``train*`` and ``test*``, or generates 20,000 samples to train on and 2,000 to evaluate on."""
    if data_dir is None:
        rng = np.random.default_rng(0)
        return Data(Arrays(*_generated(rng, 20_000)), Arrays(*_generated(rng, 2_000)), num_classes=2)
    parts = [
        [path for path in _FILES.find(data_dir, f"**/{part}*", f"{part}*.tsv") if path.suffix in (".tsv", ".txt")]
        for part in ("train", "test")
    ]
    training, evaluation = (Arrays(*read_samples(paths)) for paths in parts)
    return Data(training, evaluation, num_classes=2)


def read_samples(paths: Sequence[Path]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Reads files into memory.

    Returns:
        ``numbers``, float32 ``[samples, 13]``: log(1 + x), 0 for missing and negative numbers; ``categories``, int32
        ``[samples, 26]``; and the labels, float32 ``[samples, 1]``.

    Raises:
        DataError: a line is not as described, or there is none.
    """
    dense, categories, labels = [], [], []
    for path in paths:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    label, *fields = line.rstrip(b"\r\n").split(b"\t")
                    if len(fields) != NUM_DENSE + NUM_CATEGORIES or label not in (b"0", b"1"):
                        raise ValueError(f"label {label!r:.20} and {len(fields)} features")
                    dense.append([max(0, int(each)) if each else 0 for each in fields[:NUM_DENSE]])
                    categories.append([_row(each) for each in fields[NUM_DENSE:]])
                except ValueError as error:
                    raise DataError(
                        f"each line must have a label (0 or 1), {NUM_DENSE} integers and {NUM_CATEGORIES} hexadecimal "
                        f"categories, separated by tabs. Received: {error} in {path}, line {number}"
                    ) from error
                labels.append(int(label))
    if not labels:
        raise DataError(f"there must be at least one line. Received: none in {', '.join(map(str, paths))}")
    features = {"numbers": np.log1p(np.asarray(dense, np.float32)), "categories": np.asarray(categories, np.int32)}
    return features, np.asarray(labels, np.float32)[:, np.newaxis]


def _row(category: bytes) -> int:
    return 1 + int(category, 16) % (ROWS_PER_CATEGORY - 1) if category else 0


def zipf_rows(rng: np.random.Generator, num_rows: int, shape: tuple[int, ...], exponent: float) -> np.ndarray:
    """Row numbers whose frequencies fall with a power of the number."""
    cumulated = np.cumsum(np.arange(1, num_rows + 1) ** -exponent)
    return np.searchsorted(cumulated, rng.random(shape) * cumulated[-1]).astype(np.int32)


def _generated(rng: np.random.Generator, count: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Learnable samples: each number, and each of the frequent categories, makes a click more or less likely."""
    categories = 1 + zipf_rows(rng, ROWS_PER_CATEGORY - 1, (count, NUM_CATEGORIES), _ZIPF_EXPONENT)
    dense = np.log1p(rng.geometric(0.05, (count, NUM_DENSE))).astype(np.float32)
    hidden = np.random.default_rng(1)
    of_rows = np.zeros((NUM_CATEGORIES, ROWS_PER_CATEGORY))
    of_rows[:, :_NUM_FREQUENT] = hidden.normal(size=(NUM_CATEGORIES, _NUM_FREQUENT))
    of_numbers = hidden.normal(size=NUM_DENSE)
    score = of_rows[np.arange(NUM_CATEGORIES), categories].sum(1) + (dense - dense.mean(0)) @ of_numbers
    labels = (rng.random(count) < 1 / (1 + np.exp(-score))).astype(np.float32)
    return {"numbers": dense, "categories": categories}, labels[:, np.newaxis]


def make_model(data: Data) -> keras.Model:
    """8.3 million parameters in the tables, 10,929 in the layers.

    The tables are equally wide, and stacked in one, so that a step exchanges rows once.
    """
    dense = keras.Input((NUM_DENSE,), name="numbers")
    categories = keras.Input((NUM_CATEGORIES,), dtype="int32", name="categories")
    first_rows = np.arange(NUM_CATEGORIES, dtype=np.int32) * ROWS_PER_CATEGORY
    tables = ShardedEmbedding(NUM_CATEGORIES * ROWS_PER_CATEGORY, WIDTH, name="tables")
    hidden = layers.Dense(64, activation="relu")(dense)
    numbers = layers.Dense(WIDTH, activation="relu")(hidden)
    vectors = layers.Concatenate(axis=1)([numbers[:, np.newaxis], tables(categories + first_rows)])
    products = ops.matmul(vectors, ops.transpose(vectors, (0, 2, 1)))
    # Each pair of different vectors once.
    rows, columns = np.tril_indices(NUM_CATEGORIES + 1, -1)
    pairs = ops.take(layers.Flatten()(products), rows * (NUM_CATEGORIES + 1) + columns, axis=1)
    hidden = layers.Dense(16, activation="relu")(layers.Concatenate()([numbers, pairs]))
    return keras.Model({"numbers": dense, "categories": categories}, layers.Dense(1, name="logit")(hidden), name="dlrm")


def make_sample_data(folder: Path) -> None:
    """Writes 4,000 training samples in two files, and 1,000 test samples; some features are missing."""
    rng = np.random.default_rng(0)
    for name, count in (("train-0", 2000), ("train-1", 2000), ("test", 1000)):
        features, labels = _generated(rng, count)
        numbers = np.rint(np.expm1(features["numbers"])).astype(int)
        missing = rng.random((count, NUM_DENSE + NUM_CATEGORIES)) < 0.05
        with (folder / f"{name}.tsv").open("w") as file:
            for i in range(count):
                fields = [*map(str, numbers[i]), *(f"{row - 1:08x}" for row in features["categories"][i])]
                fields = ["" if gone else each for each, gone in zip(fields, missing[i], strict=True)]
                file.write("\t".join([str(int(labels[i, 0])), *fields]) + "\n")


TASK = Task(
    model=make_model,
    data=read_data,
    loss=lambda: keras.losses.BinaryCrossentropy(from_logits=True),
    metrics=lambda: [keras.metrics.BinaryAccuracy(name="accuracy", threshold=0.0)],
    optimizer="adagrad",
    defaults={"learning_rate": 0.05, "batch_size": 256, "epochs": 3},
    make_sample_data=make_sample_data,
)
