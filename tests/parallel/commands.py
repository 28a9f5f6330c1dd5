"""Started by a launcher on every rank: runs several command lines one after the other, for one start of TensorFlow."""

import json
import sys
from pathlib import Path

import keras

from hvdtrain.cli import main


def run_all(lines: list[list[str]]) -> int:
    for line in lines:
        keras.utils.clear_session()
        code = main(line)
        if code != 0:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(run_all(json.loads(Path(sys.argv[1]).read_text())))
