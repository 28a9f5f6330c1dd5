"""Real texts for the text task: Python, C++, type stubs and English from files that are installed anyway."""

import csv
import importlib.metadata
from pathlib import Path

import numpy as np

LINES, PER_KIND = 60, 4000
# Kind to distributions (empty: all installed) and file name endings.
KINDS = {
    "python": (("numpy", "keras", "scikit-learn"), (".py",)),
    "c++": (("tensorflow",), (".h",)),
    "stub": (("numpy", "tensorflow", "mypy"), (".pyi",)),
    "english": ((), ("METADATA", "LICENSE", "README.md", ".rst", "LICENSE.txt")),
}


def _pieces(names: tuple[str, ...], endings: tuple[str, ...], rng: np.random.Generator) -> dict[bool, list[str]]:
    """Training texts (False) and test texts (True)."""
    names = names or tuple(sorted({each.name for each in importlib.metadata.distributions()}))
    files = sorted(
        Path(str(file.locate()))
        for name in names
        for file in importlib.metadata.files(name) or []
        if file.name.endswith(endings) and file.locate().is_file()
    )
    found: dict[bool, list[str]] = {False: [], True: []}
    for number in rng.permutation(len(files)):
        try:
            lines = files[number].read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue
        is_test = bool(rng.random() < 0.2)
        for first in range(0, min(len(lines), 10 * LINES), LINES):
            text = "\n".join(lines[first : first + LINES])
            if len(text.split()) > 20:
                found[is_test].append(text)
        if len(found[False]) > PER_KIND:
            break
    return found


def write_tables(folder: Path) -> None:
    """Writes ``train.csv`` and ``test.csv``. Both have pieces of 60 lines, from different files."""
    rng = np.random.default_rng(0)
    tables: dict[bool, list[tuple[str, str]]] = {False: [], True: []}
    for label, (names, endings) in KINDS.items():
        for is_test, texts in _pieces(names, endings, rng).items():
            tables[is_test] += [(text, label) for text in texts]
    for is_test, rows in tables.items():
        with open(folder / ("test.csv" if is_test else "train.csv"), "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["text", "label"])
            writer.writerows(rows[number] for number in rng.permutation(len(rows)))
    print({label: sum(row[1] == label for row in tables[True]) for label in KINDS}, "test texts")
