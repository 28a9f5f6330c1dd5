"""Started by a launcher on every rank: runs several command lines in turn, so that TensorFlow starts only once.

Writes this rank's output and exit code of each command to files in the folder.
"""

import json
import os
import sys
from pathlib import Path

import keras

from hvdtrain.commands.cli import main
from hvdtrain.system import environment


def run_all(lines: list[list[str]], folder: Path) -> None:
    rank = environment.launcher().rank
    for i, line in enumerate(lines):
        log = os.open(folder / f"command{i}-rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        keras.utils.clear_session()
        try:
            code = main(line)
        except SystemExit as end:
            code = end.code
        sys.stdout.flush()
        (folder / f"command{i}-rank{rank}.code").write_text(str(code))


if __name__ == "__main__":
    run_all(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
