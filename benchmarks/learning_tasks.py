"""What the benchmarks of learning train: digits, and texts of which the next byte is predicted.

The text is the source code of the installed Keras and NumPy, byte by byte; each sample is used at most once. As tasks,
for benchmarks that start jobs: ``python -m hvdtrain --task benchmarks/learning_tasks.py:TRANSFORMER``.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
from keras import layers

import hvdtrain
from hvdtrain.data import Arrays, Data
from hvdtrain.tasks import cifar10
from hvdtrain.tasks.loading import load_task

CONTEXT_BYTES = 24
_EVALUATED = 1024
"""Samples of an evaluation in jobs, whose time includes it."""


class Digits:
    steps = 345  # 15 epochs on 2 ranks

    def __init__(self) -> None:
        self.task = load_task("digits")
        self.data = self.task.read_data(None)
        self.training, self.evaluation = self.data.training, self.data.evaluation

    def model(self, rate: float) -> keras.Model:
        model = self.task.make_model(self.data)
        model.compile(optimizer=keras.optimizers.Adam(rate * 2e-3), loss=self.task.make_loss())
        return model


class Text:
    steps = 800

    def __init__(self) -> None:
        text = b"".join(_sources("keras") + _sources("numpy"))
        data = np.frombuffer(text, np.uint8)
        windows = np.lib.stride_tricks.sliding_window_view(data, CONTEXT_BYTES + 1)
        last = int(0.95 * len(windows))
        self.bytes = len(data)
        # Every third window only: overlapping samples hardly differ.
        self.training = _samples(windows[:last:3])
        self.evaluation = _samples(windows[last + CONTEXT_BYTES :: 97])

    def model(self, rate: float) -> keras.Model:
        model = keras.Sequential(
            [
                layers.Input((CONTEXT_BYTES,), dtype="int32"),
                layers.Embedding(256, 16),
                layers.Flatten(),
                layers.Dense(128, activation="relu"),
                layers.Dense(256),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=keras.optimizers.Adam(rate * 1e-3), loss=loss)
        return model


class Transformer(Text):
    """As :class:`Text`, by :func:`transformer`."""

    steps = 400

    def model(self, rate: float) -> keras.Model:
        model = transformer()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=keras.optimizers.Adam(rate * 3e-3), loss=loss)
        return model


def transformer() -> keras.Model:
    """A character-level transformer of two blocks, 135 kB of parameters."""
    tokens = layers.Input((CONTEXT_BYTES,), dtype="int32")
    positions = keras.ops.arange(CONTEXT_BYTES)
    x = layers.Embedding(256, 32)(tokens) + layers.Embedding(CONTEXT_BYTES, 32)(positions)
    for _ in range(2):
        normal = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(2, 16)(normal, normal, use_causal_mask=True)
        x = x + layers.Dense(32)(layers.Dense(64, activation="relu")(layers.LayerNormalization()(x)))
    return keras.Model(tokens, layers.Dense(256)(layers.LayerNormalization()(x[:, -1])))


TASKS: dict[str, Callable[[], Digits | Text]] = {"digits": Digits, "text": Text, "transformer": Transformer}


def _sources(package: str) -> list[bytes]:
    module = __import__(package)
    folder = Path(str(module.__file__)).parent
    return [path.read_bytes() for path in sorted(folder.rglob("*.py"))]


def _samples(windows: np.ndarray) -> Arrays:
    return Arrays(windows[:, :-1].astype(np.int32), windows[:, -1].astype(np.int32))


def _cifar10() -> hvdtrain.Task:
    """The CIFAR-10 network for runs of a hundred steps: with Adam, and without the EMA of its weights."""
    defaults = {"learning_rate": 1e-3, "histograms_every": 0}
    return dataclasses.replace(cifar10.TASK, optimizer="adam", defaults=defaults)


def _text_data(data_dir: Path | None) -> Data:
    text = Transformer()
    x, y = text.evaluation.x[:_EVALUATED], np.asarray(text.evaluation.y)[:_EVALUATED]
    return Data(text.training, Arrays(x, y))


CIFAR10 = _cifar10()
TRANSFORMER = hvdtrain.Task(
    model=lambda data: transformer(),
    data=_text_data,
    loss=lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    defaults={"learning_rate": 3e-3},
)
