"""Started by a launcher on every rank: runs one file of cases under pytest, its output in a file of this rank."""

import os
import sys
from pathlib import Path

import pytest

from hvdtrain import process


def main() -> int:
    name, folder, more = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    rank = process.find_launcher().rank
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    process.import_tensorflow()
    cases = Path(__file__).with_name(f"cases_{name}.py")
    # -x: a rank that fails has to leave, or the others wait for it in their next collective.
    arguments = [str(cases), "-x", "-q", "-p", "no:cacheprovider", f"--junitxml={folder / f'rank{rank}.xml'}"]
    code = pytest.main([*arguments, f"--rootdir={Path(__file__).parent}", *more])
    if code != 0:
        sys.stdout.flush()
        os._exit(int(code))  # without Horovod's orderly end, which waits for the ranks that still run
    return 0


if __name__ == "__main__":
    sys.exit(main())
