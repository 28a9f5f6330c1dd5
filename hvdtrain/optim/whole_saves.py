"""Models that several ranks save under the same path: what is there is always one rank's, and whole."""

import errno
import functools
import inspect
import io
import os
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

from hvdtrain.distributed import runtime
from hvdtrain.system.atomic_files import commit, remove, removed_on_failure, sync


def saved_whole(save: Callable[..., None], *suffixes: str) -> Callable[..., None]:
    """A method of ``keras.Model`` that writes a file or a folder; on several ranks, under another name at first.

    Args:
        suffixes: those that Keras accepts (default: any); it refuses others by the name that the user has given.
    """
    signature = inspect.signature(save)

    @functools.wraps(save)
    def save_and_rename(*arguments: Any, **named: Any) -> None:
        call = signature.bind(*arguments, **named)
        collectives, path = runtime.collectives(), _local_path(**call.arguments)
        if collectives.size == 1 or path is None or (suffixes and path.suffix not in suffixes):
            save(*arguments, **named)
            return
        aside = path.with_name(f".writing-by-rank-{collectives.rank}-{path.name}")
        call.arguments["filepath"] = str(aside)
        remove(aside)
        with removed_on_failure(aside):
            with redirect_stdout(io.StringIO()) as said:
                save(*call.args, **call.kwargs)
            print(said.getvalue().replace(str(aside), str(path)), end="", flush=True)
            if aside.is_dir():
                _put_folder(aside, path)
            else:
                commit(aside, path)

    return save_and_rename


def _local_path(filepath: Any, overwrite: bool = True, **_: Any) -> Path | None:
    """Where a call writes; None if that is an object store, or the call asks the user, or cannot succeed."""
    if not isinstance(filepath, str | os.PathLike) or "://" in str(filepath):
        return None
    path = Path(os.path.realpath(filepath))
    return path if path.parent.is_dir() and (overwrite or not path.exists()) else None


def _put_folder(aside: Path, path: Path) -> None:
    sync(aside)
    old = aside.with_name(f"{aside.name}-old")
    with suppress(FileNotFoundError):  # There is none, or another rank has moved it.
        path.rename(old)
    try:
        aside.rename(path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        remove(aside)  # Another rank's is there.
    remove(old)
