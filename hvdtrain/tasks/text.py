"""A classifier of texts: words to numbers, an embedding, an LSTM, and softmax over the labels found in the data.

Reads ``train`` and ``test`` as .csv, .tsv (with a header line) or .jsonl, with a text and a label in each row.
"""

from pathlib import Path

import keras
import numpy as np
from keras import layers

from hvdtrain import runtime
from hvdtrain.data import Arrays
from hvdtrain.errors import DataError
from hvdtrain.failure import on_first_rank
from hvdtrain.tasks.tables import Row, read_rows
from hvdtrain.tasks.task import Data, DataSet, Task

_DATA_SET = DataSet("text", "a table of your own, with columns text and label")


def text_task(
    *,
    text: str = "text",
    label: str = "label",
    max_words: int = 200,
    split: str = "whitespace",
    vocabulary_size: int = 20_000,
    embedding: int = 64,
    units: int = 64,
) -> Task:
    """The task for other columns, lengths and sizes; for a file of one's own: ``TASK = text_task(max_words=400)``.

    Args:
        text, label: names of the columns.
        max_words: of a text; the rest is cut off, shorter ones are padded.
        split: ``whitespace`` into words, or ``character``.
        vocabulary_size: the most frequent words of the training texts that are told apart.
        embedding, units: of a word, and of the LSTM.
    """

    def vectorization(vocabulary: list[str] | None = None) -> layers.TextVectorization:
        return layers.TextVectorization(
            vocabulary_size if vocabulary is None else None,
            split=split,
            output_sequence_length=max_words,
            vocabulary=vocabulary,
        )

    def read_data(data_dir: Path | None) -> Data:
        training, test = (
            read_rows(_DATA_SET.find(data_dir, f"{part}.[ctj]s*[vl]", f"{part}.csv, .tsv or .jsonl"), text, label)
            for part in ("train", "test")
        )

        def count() -> tuple[list[str], list[str]]:
            counted = vectorization()
            counted.adapt([row.text for row in training])
            return counted.get_vocabulary(), sorted({row.label for row in training})

        # Once: ranks that count for themselves could have read other files.
        vocabulary, labels = on_first_rank(count, runtime.collectives())
        _require_known(test, labels)
        to_numbers = vectorization(vocabulary)
        numbers = {name: number for number, name in enumerate(labels)}

        def arrays(rows: list[Row]) -> Arrays:
            words = to_numbers([row.text for row in rows])
            return Arrays(np.asarray(words, np.int32), np.array([numbers[row.label] for row in rows], np.int32))

        return Data(arrays(training), arrays(test), len(labels), vocabulary)

    def make_model(data: Data) -> keras.Model:
        assert data.num_classes is not None
        return keras.Sequential(
            [
                layers.Input((max_words,), dtype="int32"),
                layers.Embedding(len(data.vocabulary), embedding, mask_zero=True),
                layers.LSTM(units),
                layers.Dense(data.num_classes),
            ],
            name="text",
        )

    return Task(
        model=make_model,
        data=read_data,
        loss=lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=lambda: [keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        optimizer="adam",
        defaults={"learning_rate": 2e-3, "batch_size": 32, "epochs": 5},
        make_sample_data=make_sample_data,
    )


def _require_known(rows: list[Row], labels: list[str]) -> None:
    for row in rows:
        if row.label not in labels:
            raise DataError(
                f"labels of the test must occur in the training. Received: {row.label!r} in {row.place}; there "
                f"are {', '.join(map(repr, labels[:10]))}"
            )


def make_sample_data(folder: Path) -> None:
    """900 rows to train on and 300 to test on: reports of the weather, of sport and of the market, of made-up words."""
    rng = np.random.default_rng(0)
    common = [f"the{i}" for i in range(40)]
    own = {label: [f"{label}{i}" for i in range(30)] for label in ("market", "sport", "weather")}
    for name, num in (("train", 900), ("test", 300)):
        lines = ["text,label"]
        for _ in range(num):
            label = str(rng.choice(list(own)))
            words = rng.choice(common, rng.integers(5, 30)).tolist() + rng.choice(own[label], 3).tolist()
            lines.append(f"{' '.join(rng.permutation(words))},{label}")
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


TASK = text_task()
