"""Files that ``keras.utils.get_file`` downloads and extracts on several ranks: once on each host, and whole."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from hvdtrain.seams import keras_internals
from hvdtrain.system import network
from hvdtrain.system.atomic_files import remove, replaced_on_success
from hvdtrain.system.folder_lock import one_process_at_a_time

_retrieve_here: Callable[..., Any] = keras_internals.RETRIEVE_URL.value()
_extract_here: Callable[..., bool] = keras_internals.EXTRACT_ARCHIVE.value()


def share_downloads() -> None:
    """From now on, the ranks of a host share what Keras downloads."""
    keras_internals.RETRIEVE_URL.replace(_retrieve)
    keras_internals.EXTRACT_ARCHIVE.replace(_extract)


def _retrieve(origin: str, target: str, *arguments: Any) -> None:
    path = Path(target)
    with one_process_at_a_time(path.parent):
        if not _is_of_this_job(path):
            with replaced_on_success(path, _aside(path)) as aside:
                _retrieve_here(origin, str(aside), *arguments)


def _extract(archive: str, target: str = ".", archive_format: Any = "auto") -> bool:
    path = Path(target).absolute()
    if Path(archive).absolute().is_relative_to(path):
        return _extract_here(archive, target, archive_format)
    with one_process_at_a_time(path.parent):
        if _is_of_this_job(path):
            return True
        aside = _aside(path)
        try:
            is_extracted = _extract_here(archive, str(aside), archive_format)
            # Where no lock is possible, another rank may have been faster.
            if is_extracted and not _is_of_this_job(path):
                os.utime(aside)  # An archive may set the time of its folder.
                remove(path)
                aside.rename(path)
        finally:
            remove(aside)
        return is_extracted


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{network.host_name()}-{os.getpid()}")


def _is_of_this_job(path: Path) -> bool:
    """Whether a rank has written it: after all ranks were started."""
    try:
        return path.stat().st_mtime > psutil.Process().create_time()
    except OSError:
        return False
