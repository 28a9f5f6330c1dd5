"""Versions of everything that could change results, and a digest of this package's code."""

import hashlib
import importlib.metadata
import sys
from pathlib import Path

from hvdtrain.errors import UsageError


def versions() -> dict[str, str]:
    """Versions whose difference between ranks would change results."""
    names = ("hvdtrain", "tensorflow", "keras", "hvdtrain-horovod", "numpy")
    return {"python": sys.version.split()[0], **{name: importlib.metadata.version(name) for name in names}}


def code_digest() -> str:
    """Changes with every line of this package: checkouts on two hosts can differ at the same version."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def check_horovod_distribution() -> None:
    """Refuses Horovod's own distribution beside hvdtrain-horovod: each overwrites files of the other."""
    try:
        other = importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        return
    raise UsageError(
        "hvdtrain-horovod must be installed without Horovod's own distribution, which overwrites its files. Received: "
        f"horovod {other} in {sys.prefix}. Remedy: pip uninstall -y horovod hvdtrain-horovod; pip install "
        "hvdtrain-horovod"
    )
