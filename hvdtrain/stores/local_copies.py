"""Local copies of object stores: those of readers, and those set aside."""

import tempfile
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from hvdtrain.errors import DataError
from hvdtrain.system import environment, network
from hvdtrain.system.atomic_files import remove


@contextmanager
def reading_folder() -> Iterator[Path]:
    """A folder for what a reader downloads, deleted at the end; folders of readers that were killed are deleted too.

    Raises:
        DataError: the cache folder cannot be written.
    """
    parent = environment.store_cache_dir() / "reading"
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"the cache folder must be writable. Received: {parent} ({error}). HVDTRAIN_STORE_CACHE=/path sets another."
        ) from error
    # Hosts may share the folder, and process ids are unique only within a host.
    prefix = f"{network.host_name()}-"
    for other in parent.glob(f"{prefix}*-*"):
        pid = other.name.removeprefix(prefix).partition("-")[0]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            with suppress(OSError):
                remove(other)
    own = psutil.Process().pid
    with tempfile.TemporaryDirectory(prefix=f"{prefix}{own}-", dir=parent, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def set_aside(folder: Path, *, but: Container[str] = ()) -> Path:
    """Moves a local copy that the store's content replaces to another folder, which keeps the latest such copy.

    Args:
        but: the names of files that stay.
    """
    target = folder.with_name(f"{folder.name}.aside")
    remove(target)
    target.mkdir()
    for each in list(folder.iterdir()):
        if each.name not in but:
            each.rename(target / each.name)
    return target
