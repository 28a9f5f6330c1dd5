"""A text classifier with a vocabulary of usual size, on generated texts: for benchmarks/compression.py."""

import dataclasses
from pathlib import Path

import numpy as np

from hvdtrain.tasks.text import text_task

_WORDS, _TEXTS = 20_000, 2_000


def make_sample_data(folder: Path) -> None:
    """Writes texts of 30 words, three of which tell the label, from a vocabulary of 20,000."""
    rng = np.random.default_rng(0)
    labels = ("market", "sport", "weather")
    for name, number in (("train", _TEXTS), ("test", 300)):
        lines = ["text,label"]
        for i in range(number):
            label = labels[i % 3]
            words = [f"w{word}" for word in rng.integers(0, _WORDS, 27)]
            words += [f"{label}{word}" for word in rng.integers(0, 30, 3)]
            lines.append(f"{' '.join(rng.permutation(words))},{label}")
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


TEXT = dataclasses.replace(text_task(max_words=30, vocabulary_size=_WORDS), make_sample_data=make_sample_data)
