"""Wheels that are kept for later builds, of any checkout of this user."""

import hashlib
import os
import platform
import re
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent


def folder() -> Path:
    """One for each text of what is built."""
    digest = hashlib.sha256(platform.machine().encode())
    for path in sorted(HERE.glob("*.*")):
        digest.update(path.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "hvdtrain" / "horovod" / digest.hexdigest()[:16]


def find(version: str) -> Path | None:
    """A wheel of a version that works with this machine's C library: the folder may be shared with others."""
    return next(filter(fits, sorted(folder().glob(f"*-{version}-*.whl"))), None)


def fits(wheel: Path) -> bool:
    needed = re.search(r"manylinux_(\d+)_(\d+)_", wheel.name)
    library, version = platform.libc_ver()
    if needed is None or library != "glibc":
        return False
    return tuple(map(int, needed.groups())) <= tuple(map(int, version.split(".")[:2]))


def keep(wheel: Path) -> None:
    try:
        folder().mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder(), delete=False) as aside:
            aside.write(wheel.read_bytes())
        os.chmod(aside.name, 0o644)
        os.replace(aside.name, folder() / wheel.name)
    except OSError as error:
        print(f"the wheel cannot be kept for later builds: {error}", file=sys.stderr)
