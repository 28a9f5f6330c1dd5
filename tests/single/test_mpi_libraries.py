"""Intel MPI from PyPI opens libfabric by name; it is beside Intel MPI in the environment, with its providers."""

import os
import subprocess
import sys
from pathlib import Path

from shared_libraries import make_library

# Opens libfabric as Intel MPI does when it starts; a machine may have another one.
PROGRAM = """
import contextlib, ctypes, os, sys
from hvdtrain.system import mpi_libraries
sys.prefix = sys.argv[1]
mpi_libraries.preload()
with contextlib.suppress(OSError):
    ctypes.CDLL("libfabric.so.1")
print(f"{sys.prefix}/lib/libfabric.so.1" in open("/proc/self/maps").read(), os.environ.get("FI_PROVIDER_PATH"))
"""


def found(prefix: Path, **more: str) -> str:
    env = {name: value for name, value in os.environ.items() if name != "FI_PROVIDER_PATH"} | more
    command = [sys.executable, "-c", PROGRAM, prefix]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.strip()


def test_libfabric_is_found_by_name(tmp_path):
    make_library(tmp_path / "lib" / "libmpi.so.12")
    assert found(tmp_path) == "False None"
    make_library(tmp_path / "lib" / "libfabric.so.1")
    assert found(tmp_path) == f"True {tmp_path / 'lib'}"
    assert found(tmp_path, FI_PROVIDER_PATH="/of/the/site") == "True /of/the/site"
    # Beside another MPI, it is none of ours.
    (tmp_path / "lib" / "libmpi.so.12").unlink()
    assert found(tmp_path) == "False None"
