"""Models that several ranks save to the same file: it is always one rank's whole file."""

import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvdtrain.distributed import runtime
from hvdtrain.system.atomic_files import replaced_on_success

_SUFFIXES = (".keras", ".h5")


def with_whole_files(save: Callable[..., None]) -> Callable[..., None]:
    """A method of ``keras.Model`` that saves it; on several ranks, it writes another file and renames that."""
    signature = inspect.signature(save)

    @functools.wraps(save)
    def save_and_rename(*arguments: Any, **named: Any) -> None:
        call = signature.bind(*arguments, **named)
        call.apply_defaults()
        rank, path = runtime.collectives().rank, _file(**call.arguments)
        if runtime.collectives().size == 1 or path is None:
            save(*arguments, **named)
            return
        with replaced_on_success(path, path.with_name(f".writing-by-rank-{rank}-{path.name}")) as aside:
            call.arguments["filepath"] = str(aside)
            save(*call.args, **call.kwargs)

    return save_and_rename


def _file(filepath: Any, overwrite: bool, zipped: bool | None = None, **_: Any) -> Path | None:
    """The file that a call writes; None if it writes a folder or to an object store, asks the user, or fails."""
    if not isinstance(filepath, str | os.PathLike) or "://" in str(filepath) or zipped is False:
        return None
    path = Path(os.path.realpath(filepath))
    if path.suffix not in _SUFFIXES or not path.parent.is_dir() or path.is_dir() or (path.exists() and not overwrite):
        return None
    return path
