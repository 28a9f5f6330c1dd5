"""The folder of a checkpoint: written aside, verified, renamed into place; and the folder that holds them.

A checkpoint ``step-00000120/`` holds

* ``state.index``, ``state.data-00000-of-00001``: tensors in TensorFlow's checkpoint format
  (``tf.train.load_checkpoint(folder / "state")``),
* ``manifest.json``: what the tensors are, whose they are, and all state that is no tensor,
* ``SHA256SUMS``: the digests of these files, for ``sha256sum --check`` too.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.errors import DataError
from hvdtrain.files import sync, sync_folder

FORMAT = 1
_MANIFEST, _SUMS, _TENSORS = "manifest.json", "SHA256SUMS", "state"
_NAME = re.compile(r"step-(\d{8,})")
_OURS = re.compile(r"\.?step-\d{8,}(\.(writing|deleting|aside\d*))?")


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(folder: Path) -> int:
    """The step that a checkpoint's name tells."""
    match = _NAME.fullmatch(folder.name)
    assert match is not None, folder
    return int(match[1])


def checkpoints_in(directory: Path) -> list[Path]:
    """The checkpoints in a folder, whole or not, the earliest first."""
    if not directory.is_dir():
        return []
    return sorted((path for path in directory.iterdir() if _NAME.fullmatch(path.name)), key=step_of)


def require_ours(directory: Path) -> None:
    """Raises DataError where checkpoints must not go; nothing is touched."""
    if directory.exists() and not directory.is_dir():
        raise DataError(f"checkpoints must go to a folder. Received: {directory}, a file. Give another place.")
    if directory.is_dir():
        names = [path.name for path in directory.iterdir()]
        if names and not any(_OURS.fullmatch(name) for name in names):
            raise DataError(
                "checkpoints must go to a new folder, an empty one, or one that holds checkpoints. Received: "
                f"{directory}, which holds something else ({min(names)}). It was left untouched; give another folder."
            )


def write(directory: Path, step: int, tensors: Mapping[str, Any], manifest: Mapping[str, Any]) -> Path:
    """Writes a checkpoint, unless a whole one of this step is there.

    Args:
        tensors: by name; TensorFlow's or NumPy's.
        manifest: what else to keep, ready for JSON.

    Returns:
        The folder of the checkpoint.

    Raises:
        OSError, tf.errors.OpError: the file system refused; earlier checkpoints are untouched.
    """
    target = directory / folder_name(step)
    aside = directory / f".{target.name}.writing"
    directory.mkdir(parents=True, exist_ok=True)
    if target.exists():
        if damage(target) is None:
            return target
        set_aside(target)
    if aside.exists():
        shutil.rmtree(aside)
    aside.mkdir()
    values = [tf.convert_to_tensor(value) for value in tensors.values()]
    tf.raw_ops.SaveV2(
        prefix=str(aside / _TENSORS), tensor_names=list(tensors), shape_and_slices=[""] * len(values), tensors=values
    )
    (aside / _MANIFEST).write_text(json.dumps({"format": FORMAT, "step": step, **manifest}, indent=1) + "\n")
    (aside / _SUMS).write_text(_sums(aside))
    sync_folder(aside)
    _verify(aside, tensors)
    aside.rename(target)
    sync(directory)
    return target


def _verify(folder: Path, tensors: Mapping[str, Any]) -> None:
    reader = tf.train.load_checkpoint(str(folder / _TENSORS))
    for name, value in tensors.items():
        if not np.array_equal(_bytes(reader.get_tensor(name)), _bytes(value)):
            raise OSError(f"what was read back is not what was written: {name} differs")


def _bytes(value: Any) -> np.ndarray:
    # Compared as bytes, a NaN equals itself; as an array, nothing is copied.
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


def _sums(folder: Path) -> str:
    files = sorted(path for path in folder.iterdir() if path.name != _SUMS)
    return "".join(f"{_sha256(path)}  {path.name}\n" for path in files)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def damage(folder: Path) -> str | None:
    """What is wrong with the files of a checkpoint; None for a whole one."""
    missing = [name for name in (_MANIFEST, f"{_TENSORS}.index", _SUMS) if not (folder / name).is_file()]
    if missing:
        return f"{', '.join(missing)} is missing"
    try:
        expected, found = (folder / _SUMS).read_bytes(), _sums(folder)
    except OSError as error:
        return str(error)
    if expected == found.encode():
        return None
    listed = expected.decode(errors="replace").splitlines()
    wrong = {line[66:] for line in {*listed, *found.splitlines()} if line not in listed or line not in found}
    return f"{', '.join(sorted(wrong)) or 'what is there'} does not match {_SUMS}"


def read(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The manifest and the tensors of a whole checkpoint.

    Raises:
        DataError: a newer version wrote it.
    """
    manifest = json.loads((folder / _MANIFEST).read_text())
    if manifest["format"] > FORMAT:
        raise DataError(
            f"a checkpoint must be of format {FORMAT} or earlier. Received: {folder}, of format {manifest['format']}, "
            f"written by hvdtrain {manifest.get('versions', {}).get('hvdtrain', 'of a later version')}. It was left "
            "untouched; use that version, or another --run-dir."
        )
    reader = tf.train.load_checkpoint(str(folder / _TENSORS))
    return manifest, {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def set_aside(folder: Path) -> Path:
    """Renames a checkpoint so that it is found no more, and does not delete it."""
    number = 1
    while (target := folder.with_name(f"{folder.name}.aside{number}")).exists():
        number += 1
    folder.rename(target)
    return target


def delete_all_but(directory: Path, keep: int) -> None:
    """Deletes the earliest checkpoints, and what an interrupted write or deletion has left."""
    for folder in checkpoints_in(directory)[:-keep]:
        # Renamed first: a reader must not find half of it.
        folder.rename(directory / f".{folder.name}.deleting")
    for leftover in directory.glob(".step-*.*ing"):
        if _OURS.fullmatch(leftover.name):
            shutil.rmtree(leftover, ignore_errors=True)
