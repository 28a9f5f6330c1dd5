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

import keras
import tensorflow as tf

from hvdtrain.distributed.collectives import Collectives
from hvdtrain.seams import keras_internals, tensorflow_internals
from hvdtrain.system.atomic_files import commit, remove, removed_on_failure, sync
from hvdtrain.system.folder_lock import one_process_at_a_time

Save = Callable[..., Any]

_KERAS_SAVES = (keras_internals.SAVE_MODEL, keras_internals.SAVE_WEIGHTS, keras_internals.SAVE_HDF5)
_keras_saves: list[Save] = [each.value() for each in _KERAS_SAVES]
_export: Save = keras.Model.export
_save_exported: Save = tensorflow_internals.SAVE_EXPORTED.value()
_save_checkpoint: Save = tensorflow_internals.SAVE.of(tensorflow_internals.CHECKPOINT_SAVER.value())


def save_whole(collectives: Collectives) -> None:
    """From now on, what Keras and TensorFlow save is whole, also if other ranks save it at the same time.

    That is models, weights, exported models, and those of ``tf.saved_model`` and ``tf.train.Checkpoint``.
    """
    for seam, save in zip(_KERAS_SAVES, _keras_saves, strict=True):
        seam.replace(_whole(save, "filepath", collectives))
    keras.Model.export = _whole(_export, "filepath", collectives, makes_parents=True)
    tensorflow_internals.SAVE_EXPORTED.replace(_whole(_save_exported, "export_dir", collectives, makes_parents=True))
    tensorflow_internals.SAVE.set(
        tensorflow_internals.CHECKPOINT_SAVER.value(),
        _whole(_save_checkpoint, "file_prefix", collectives, makes_parents=True),
    )


def _whole(save: Save, parameter: str, collectives: Collectives, *, makes_parents: bool = False) -> Save:
    """A function that writes a path; on several ranks, into a folder of the rank at first.

    Args:
        parameter: the one that is the path, or what the names of several files begin with.
        makes_parents: whether the function makes the folders that the path lies in.
    """
    signature = inspect.signature(save)

    @functools.wraps(save)
    def save_and_move(*arguments: Any, **named: Any) -> Any:
        call = signature.bind(*arguments, **named)
        given = call.arguments[parameter]
        path = _local_path(given, makes_parents) if collectives.size > 1 else None
        if path is None:
            return save(*arguments, **named)
        folder = _place_for(path) / f".writing-by-rank-{collectives.rank}-{path.name}"
        remove(folder)
        with removed_on_failure(folder):
            folder.mkdir()
            aside = str(folder / path.name)
            call.arguments[parameter] = aside
            with redirect_stdout(io.StringIO()) as said:
                result = save(*call.args, **call.kwargs)
            print(said.getvalue().replace(aside, str(path)), end="", flush=True)
            _move_contents(folder, path)
        return given if tf.is_tensor(result) else result  # A checkpoint returns its path.

    return save_and_move


def _local_path(given: Any, makes_parents: bool) -> Path | None:
    """Where a call writes; None if that is an object store or a graph's, or the call cannot succeed."""
    if not isinstance(given, str | os.PathLike) or "://" in str(given) or not tf.executing_eagerly():
        return None
    path = Path(os.path.realpath(given))
    if makes_parents:
        with suppress(OSError):  # The function says what is wrong.
            path.parent.mkdir(parents=True, exist_ok=True)
    return path if path.parent.is_dir() else None


def _place_for(path: Path) -> Path:
    """Where to write aside: beside the path, or in it if it is a folder that cannot be replaced."""
    can_be_replaced = os.access(path.parent, os.W_OK) and not path.is_mount()
    return path if path.is_dir() and not can_be_replaced else path.parent


def _move_contents(folder: Path, path: Path) -> None:
    """Moves what was written to its place; the file that names others last, as the index of a checkpoint."""
    sync(folder)
    with one_process_at_a_time(path.parent):
        for each in sorted(folder.iterdir(), key=lambda each: (each.name == path.name, each.name)):
            _move(each, path.with_name(each.name))
    remove(folder)


def _move(path: Path, target: Path) -> None:
    """Moves a file or a folder to its place, where a folder keeps the other files that it has."""
    if not path.is_dir():
        commit(path, target)
    # Within its target, a folder lies beside those that other ranks are writing.
    elif target in path.parents or (target.is_dir() and _names_in(target) - _names_in(path)):
        for each in sorted(path.iterdir()):
            _move(each, target / each.name)
    else:
        _replace_folder(path, target)


def _names_in(folder: Path) -> set[Path]:
    return {each.relative_to(folder) for each in folder.rglob("*")}


def _replace_folder(folder: Path, target: Path) -> None:
    old = folder.with_name(f"{folder.name}-old")
    with suppress(FileNotFoundError):  # There is none, or, where no lock is possible, another rank has moved it.
        target.rename(old)
    try:
        folder.rename(target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            with suppress(OSError):  # The first error matters more.
                old.rename(target)
            raise  # Otherwise, another rank's is there.
