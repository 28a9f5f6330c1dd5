"""What is changed in the wheel that Horovod's own build makes."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

LIBRARY = "horovod/tensorflow/mpi_lib.so"

# The library uses nothing of Python, so that one serves every version; Horovod names it after one.
SUFFIX_MODULE = "horovod/common/util.py"
SUFFIX = """

# Added by the build of hvdtrain.
def get_ext_suffix():
    return ".so"
"""

# Horovod's DistributedOptimizer overrides methods that Keras 3 never calls, so that it applies gradients without
# averaging them and without a message. Programs that import Horovod alone need to hear of it too.
KERAS_MODULE = "horovod/_keras/__init__.py"
KERAS_3_CHECK = """

# Added by the build of hvdtrain.
_create_distributed_optimizer = create_distributed_optimizer


def create_distributed_optimizer(keras, *args, **kwargs):
    if version.parse(keras.__version__) >= version.parse("3"):
        raise RuntimeError(
            "Horovod's DistributedOptimizer must be used with Keras 2: Keras 3 never calls the methods that it "
            f"overrides, and gradients would not be averaged. Received: Keras {keras.__version__}. Use "
            "hvdtrain.DistributedOptimizer instead."
        )
    return _create_distributed_optimizer(keras, *args, **kwargs)
"""


# Horovod's horovodrun with changes.
ADDED_TO_RUNNER = ("command.py", "forwarded.py")
ENTRY_POINTS = "[console_scripts]\nhorovodrun = horovod.runner.command:main\n"


def repack(
    built: Path, folder: Path, metadata: str, run_paths: list[str], *, is_portable: bool, keeps_mpi_paths: bool
) -> Path:
    """Makes the wheel of hvdtrain-horovod from Horovod's own.

    Args:
        built: Horovod's wheel.
        folder: where to work.
        metadata: the METADATA file, with our requirements: Horovod's names no TensorFlow and no MPI.
        run_paths: where the library looks for others; the build leaves paths of its own there.
        keeps_mpi_paths: whether those of MPI are kept: of a site's, which stays where it is. Not all sites have it in
            LD_LIBRARY_PATH.
        is_portable: whether all else that the library needs belongs to every Linux; auditwheel checks that and finds
            the oldest C library it works with.

    Returns:
        The wheel.
    """
    run("wheel", "unpack", "--dest", folder / "tree", built)
    (tree,) = (folder / "tree").iterdir()
    (library,) = (tree / LIBRARY).parent.glob("mpi_lib*.so")
    library.rename(tree / LIBRARY)
    paths = [*run_paths, *(_mpi_paths(tree / LIBRARY) if keeps_mpi_paths else [])]
    run("patchelf", *(("--set-rpath", ":".join(paths)) if paths else ("--remove-rpath",)), tree / LIBRARY)
    for module, text in ((SUFFIX_MODULE, SUFFIX), (KERAS_MODULE, KERAS_3_CHECK)):
        with open(tree / module, "a") as file:
            file.write(text)
    for name in ADDED_TO_RUNNER:
        shutil.copy(Path(__file__).with_name(name), tree / "horovod" / "runner" / name)
    name, version = (line.partition(": ")[2] for line in metadata.splitlines()[1:3])
    (info,) = tree.glob("*.dist-info")
    info = info.rename(tree / f"{name.replace('-', '_')}-{version}.dist-info")
    (info / "METADATA").write_text(metadata)
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    platform = sysconfig.get_platform().replace("-", "_")
    (info / "WHEEL").write_text(
        f"Wheel-Version: 1.0\nGenerator: hvdtrain\nRoot-Is-Purelib: false\nTag: py3-none-{platform}\n"
    )
    out = folder / "packed"
    out.mkdir()
    run("wheel", "pack", "--dest-dir", out, tree)
    if is_portable:
        (packed,) = out.iterdir()
        out = folder / "portable"
        excluded = ("--exclude", "libmpi.so.*", "--exclude", "libtensorflow*")
        run("auditwheel", "repair", *excluded, "--wheel-dir", out, packed)
    (wheel,) = out.iterdir()
    return wheel


def _mpi_paths(library: Path) -> list[str]:
    paths = dict.fromkeys(run("patchelf", "--print-rpath", library).strip().split(":"))
    return [path for path in paths if path and any(Path(path).glob("libmpi*.so*"))]


def run(*command: str | Path) -> str:
    """Runs a tool of the environment that builds; returns what it prints."""
    scripts = sysconfig.get_path("scripts")
    env = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    program = [sys.executable, "-m"] if command[0] == "wheel" else []
    return subprocess.run([*program, *command], env=env, check=True, stdout=subprocess.PIPE, text=True).stdout
