"""The text task: a classifier with an embedding, an LSTM and a softmax over the labels found in the data.

Reads ``train`` and ``test`` as .csv, .tsv (with a header line) or .jsonl, each row with a text and a label.
"""

from pathlib import Path

import keras
import numpy as np
from keras import layers

from hvdtrain.data import Arrays, Data
from hvdtrain.distributed import runtime
from hvdtrain.errors import DataError
from hvdtrain.fault_tolerance.collective_errors import on_first_rank
from hvdtrain.tasks.tables import Row, read_rows
from hvdtrain.tasks.task import DataFiles, Task

_FILES = DataFiles("text", "a table of your own, with columns text and label")


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
    """A text task with other columns, lengths and sizes. In a task file: ``TASK = text_task(max_words=400)``.

    Args:
        text, label: names of the columns.
        max_words: length of a text; longer texts are truncated, shorter ones padded.
        split: ``whitespace`` into words, or ``character``.
        vocabulary_size: maximum number of tokens, for the most frequent words of the training texts.
        embedding, units: sizes of the embedding and of the LSTM.
    """

    def vectorization(vocabulary: list[str] | None = None) -> layers.TextVectorization:
        return layers.TextVectorization(
            vocabulary_size if vocabulary is None else None,
            split=split,
            output_sequence_length=max_words,
            vocabulary=vocabulary,
        )

    def read_data(data_dir: Path | None) -> Data:
        training, test = (read_rows(_find(data_dir, part), text, label) for part in ("train", "test"))

        def count() -> tuple[list[str], list[str]]:
            if not any(row.text.strip() for row in training):
                raise DataError("training texts must contain words. Received: only blank ones")
            counted = vectorization()
            counted.adapt([row.text for row in training])
            return counted.get_vocabulary(), sorted({row.label for row in training})

        # Only on rank 0: ranks that each adapt their own vocabulary could have read different files.
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


def _find(data_dir: Path | None, part: str) -> list[Path]:
    found = _FILES.find(data_dir, f"{part}.[ctj]s*[vl]", f"{part}.csv, .tsv or .jsonl")
    if len(found) > 1:
        raise DataError(f"--data-dir must hold one file of {part} rows. Received: {', '.join(map(str, found))}")
    return found


def _require_known(rows: list[Row], labels: list[str]) -> None:
    for row in rows:
        if row.label not in labels:
            raise DataError(
                f"test labels must occur in the training data. Received: {row.label!r} in {row.place}; training "
                f"labels: {', '.join(map(repr, labels[:10]))}"
            )


def make_sample_data(folder: Path) -> None:
    """Writes 900 training and 300 test rows of made-up words with the labels market, sport and weather."""
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
