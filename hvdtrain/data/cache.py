"""Cache files: derived from data files, named by a digest, and replaced atomically."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from hvdtrain.system import network
from hvdtrain.system.atomic_files import replaced_on_success


def cache_name(path: Path) -> str:
    """The name of a data file's cache entries: a digest of its absolute path."""
    return hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:24]


@contextmanager
def cache_file(path: Path) -> Iterator[BinaryIO]:
    """Opens a file for writing that becomes ``path`` when the block ends without an exception."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Hosts may share the folder, and process ids are unique only within a host.
    aside = path.with_name(f"{path.name}.{network.host_name()}-{os.getpid()}")
    with replaced_on_success(path, aside) as aside, open(aside, "wb") as file:
        yield file
