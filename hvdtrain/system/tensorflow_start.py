"""Imports TensorFlow without the lines that it prints at start-up."""

import contextlib
import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hvdtrain.system import cuda_libraries, environment, mpi_libraries
from hvdtrain.system.deferred_packages import deferred_packages

# Lines that TensorFlow writes to stderr at every start and that no setting turns off: its absl
# logging is not initialized in Python, so TF_CPP_MIN_LOG_LEVEL is ignored (seen with 2.21).
_STARTUP_MESSAGES = (
    "absl::InitializeLog()",
    "oneDNN custom operations are on",
    "Could not find cuda drivers",
    "failed call to cuInit",
    "This TensorFlow binary is optimized",
    "To enable the following instructions",
    "TF-TRT Warning",
    "Unable to register cu",
    "computation placer already registered",
)


@contextlib.contextmanager
def without_startup_messages() -> Iterator[None]:
    """Holds back stderr, C++ output included, then forwards everything but TensorFlow's start-up messages."""
    sys.stderr.flush()
    original = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(original, 2)
            os.close(original)
            held.seek(0)
            for line in held.read().decode(errors="replace").splitlines(keepends=True):
                if not is_startup_message(line):
                    sys.stderr.write(line)


def is_startup_message(line: str) -> bool:
    """Whether TensorFlow writes this line at every start."""
    return any(message in line for message in _STARTUP_MESSAGES)


def import_tensorflow() -> None:
    """Prepares the environment, imports TensorFlow and initializes its list of devices."""
    cuda_libraries.preload()
    mpi_libraries.preload()
    if "tensorflow" in sys.modules:
        return
    environment.prepare_environment()
    with without_startup_messages(), _without_garbage_collection(), deferred_packages():
        import tensorflow as tf

        tf.config.list_physical_devices()


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """What an import creates stays: looking for garbage in it takes a fifth of the time of TensorFlow's import."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        # Later collections do not look at it again.
        gc.freeze()
        if was_enabled:
            gc.enable()


def library() -> Path:
    """TensorFlow's library that opens those of CUDA."""
    import tensorflow as tf

    return Path(tf.sysconfig.get_lib(), "libtensorflow_framework.so.2")
