"""The text task on real text: classifies Python, C++, type stubs and English from installed files.

    launch/run mpirun -np 2 python benchmarks/text_sources.py

Splits files of NumPy, Keras, TensorFlow, scikit-learn and mypy, and the licences and descriptions of all packages, into
pieces of 60 lines; training and test use different files. Prints the test accuracy. Goal: 0.95.
"""

import argparse
import csv
import importlib.metadata
import shutil
import tempfile
from pathlib import Path

import numpy as np

import hvdtrain

topology = hvdtrain.init(seed=0)

from hvdtrain.commands import cli
from hvdtrain.distributed import runtime

LINES, PER_KIND = 60, 4000
# Kind to distributions (empty: all installed) and file name endings.
KINDS = {
    "python": (("numpy", "keras", "scikit-learn"), (".py",)),
    "c++": (("tensorflow",), (".h",)),
    "stub": (("numpy", "tensorflow", "mypy"), (".pyi",)),
    "english": ((), ("METADATA", "LICENSE", "README.md", ".rst", "LICENSE.txt")),
}


def pieces(names: tuple[str, ...], endings: tuple[str, ...], rng: np.random.Generator) -> dict[bool, list[str]]:
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
    rng = np.random.default_rng(0)
    tables: dict[bool, list[tuple[str, str]]] = {False: [], True: []}
    for label, (names, endings) in KINDS.items():
        for is_test, texts in pieces(names, endings, rng).items():
            tables[is_test] += [(text, label) for text in texts]
    for is_test, rows in tables.items():
        with open(folder / ("test.csv" if is_test else "train.csv"), "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["text", "label"])
            writer.writerows(rows[number] for number in rng.permutation(len(rows)))
    print({label: sum(row[1] == label for row in tables[True]) for label in KINDS}, "test texts")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    arguments = parser.parse_args()
    collectives = runtime.current().collectives
    folder = Path(collectives.allgather(tempfile.mkdtemp(prefix="text_sources-"))[0])
    if topology.rank == 0:
        write_tables(folder)
    collectives.barrier()
    options = ["--epochs", str(arguments.epochs), "--lr-decay", "cosine", "--clip-norm", "1", "--ema", "0.99"]
    code = cli.main(["--task", "text", "--data-dir", str(folder), "--run-dir", str(folder / "run"), *options])
    if topology.rank == 0:
        shutil.rmtree(folder)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
