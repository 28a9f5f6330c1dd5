"""The text task on real text: classifies Python, C++, type stubs and English from installed files.

    launch/run mpirun -np 2 python benchmarks/text_sources.py

Splits files of NumPy, Keras, TensorFlow, scikit-learn and mypy, and the licences and descriptions of all packages, into
pieces of 60 lines; training and test use different files. Prints the test accuracy. Goal: 0.95.
"""

import argparse
import shutil
import tempfile
from pathlib import Path

import hvdtrain

topology = hvdtrain.init(seed=0)

from text_files import write_tables

from hvdtrain.commands import cli
from hvdtrain.distributed import runtime


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
