"""Versions of everything that could change results, and a digest of this package's code."""

import hashlib
import importlib.metadata
import re
import sys
from pathlib import Path

from hvdtrain.errors import UsageError


def versions() -> dict[str, str]:
    """Versions whose difference between ranks would change results."""
    names = ("hvdtrain", "tensorflow", "keras", "hvdtrain-horovod", "numpy")
    return {"python": sys.version.split()[0], **{name: version_of(name) for name in names}}


def version_of(name: str) -> str:
    """The version of a distribution, or of the one that provides this module: tensorflow-cpu, keras-nightly, ….

    Raises:
        importlib.metadata.PackageNotFoundError: there is neither.
    """
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        providers = importlib.metadata.packages_distributions().get(name)
        if not providers:
            raise
        return importlib.metadata.version(providers[0])


def horovod_built_for() -> str | None:
    """The version of TensorFlow that Horovod was compiled for; None if it is not known."""
    summary = importlib.metadata.metadata("hvdtrain-horovod")["Summary"]  # Written by launch/horovod/backend.py.
    found = re.search(r"built for TensorFlow (\S+),", summary)
    return found[1] if found else None


def code_digest() -> str:
    """Changes with every line of this package: checkouts on two hosts can differ at the same version."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def rebuilt() -> str:
    """How this environment gets a Horovod for its TensorFlow."""
    if (Path(sys.prefix).parent / "settings.json").exists():  # of launch/run
        return "delete .venvs, and call launch/run again"
    return (
        f"HVDTRAIN_TENSORFLOW=installed {sys.executable} -m pip install --no-deps --no-build-isolation "
        "--force-reinstall FOLDER, where FOLDER is launch/horovod of a checkout, or the source archive of "
        "hvdtrain-horovod"
    )


def check_horovod_distribution(tensorflow_version: str) -> None:
    """Refuses a Horovod that was compiled for another TensorFlow, or overwritten by Horovod's own distribution.

    Args:
        tensorflow_version: that of the TensorFlow that is imported.

    Raises:
        UsageError: this environment has such a Horovod.
    """
    built_for = horovod_built_for()
    if built_for not in (None, tensorflow_version):
        raise UsageError(
            "hvdtrain-horovod must be built for the TensorFlow that is installed. Received: TensorFlow "
            f"{tensorflow_version}, and hvdtrain-horovod for TensorFlow {built_for}, in {sys.prefix}. Remedy: "
            f"{rebuilt()}"
        )
    try:
        other = importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        return
    raise UsageError(
        "hvdtrain-horovod must be installed without Horovod's own distribution, which overwrites its files. Received: "
        f"horovod {other} in {sys.prefix}. Remedy: pip uninstall -y horovod hvdtrain-horovod; pip install "
        "hvdtrain-horovod"
    )
