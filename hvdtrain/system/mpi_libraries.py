"""Libraries that Intel MPI opens by name, in an environment that has Intel MPI from PyPI."""

import contextlib
import ctypes
import sys
from pathlib import Path

from hvdtrain.system import environment

_INTEL_MPI, _LIBFABRIC = "libmpi.so.12", "libfabric.so.1"


def preload() -> None:
    """Opens libfabric, if this environment has Intel MPI's; call it before MPI starts.

    Intel MPI sends over it between hosts. It has no run path, and the dynamic loader ignores that of Horovod's library,
    which loads Intel MPI. The loader finds a library by its name once it is loaded.
    """
    folder = Path(sys.prefix, "lib")
    if (folder / _INTEL_MPI).exists() and (folder / _LIBFABRIC).exists():
        environment.set_provider_folder(folder)
        with contextlib.suppress(OSError):  # MPI says why it does not start.
            ctypes.CDLL(str(folder / _LIBFABRIC))
