"""Started by a launcher on every rank: runs files of cases under pytest and writes the output to the rank's log."""

import logging
import os
import sys
from pathlib import Path

import pytest

from hvdtrain.system import environment, tensorflow_start


class _NoUnconvertedFunctions(logging.Handler):
    """Fails a test in which AutoGraph warns that it cannot convert a function."""

    def emit(self, record: logging.LogRecord) -> None:
        assert "AutoGraph could not transform" not in record.getMessage()


class _OwnNotes:
    """A plugin: ranks compare what a case has sharded and adapted, not what the cases before it have."""

    @pytest.fixture(autouse=True)
    def _own_notes(self, monkeypatch):
        from hvdtrain.data import generated_order, sharded_order
        from hvdtrain.distributed import noted_layers

        monkeypatch.setattr(sharded_order, "_orders", [])
        monkeypatch.setattr(generated_order, "_of_sharded", [])
        monkeypatch.setattr(noted_layers, "_layers", [])


def main() -> int:
    names, folder, more = sys.argv[1].split("+"), Path(sys.argv[2]), sys.argv[3:]
    rank = environment.launcher().rank
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    tensorflow_start.import_tensorflow()
    logging.getLogger("tensorflow").addHandler(_NoUnconvertedFunctions())
    files = [path for name in names for path in Path(__file__).parents[1].glob(f"*/cases_{name}.py")]
    assert len(files) == len(names), f"files of cases must exist. Received: {names}, found: {files}"
    # -x: a rank that fails must end, or the others wait for it in their next collective.
    # xunit1: properties of a test case are part of it.
    options = ["-x", "-q", "-p", "no:cacheprovider", "-o", "junit_family=xunit1"]
    arguments = [*map(str, files), *options, f"--junitxml={folder / f'rank{rank}.xml'}"]
    code = pytest.main([*arguments, f"--rootdir={files[0].parent}", *more], plugins=[_OwnNotes()])
    if code != 0:
        sys.stdout.flush()
        os._exit(int(code))  # without Horovod's shutdown, which waits for the other ranks
    return 0


if __name__ == "__main__":
    sys.exit(main())
