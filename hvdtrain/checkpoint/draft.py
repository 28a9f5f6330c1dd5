"""Writes a checkpoint: to a temporary folder, synced to disk, read back and renamed."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.checkpoint import storage
from hvdtrain.checkpoint.rank_file import RankFileReader, RankFileWriter
from hvdtrain.checkpoint.shared_tensors import SharedTensors
from hvdtrain.checkpoint.storage import MANIFEST, RANKS, SUMS, TENSORS, folder_name
from hvdtrain.checkpoint.transfer import PIECE_BYTES, Spec
from hvdtrain.system.atomic_files import commit, remove, removed_on_failure

# How many files of tensors there are at most, and how large each of them is at least, except the last.
_MAX_FILES, _MIN_FILE_BYTES = 16, 64 << 20


class Draft:
    """A checkpoint that is being written, invisible to readers until :meth:`commit`.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(self, directory: Path, step: int, specs: Sequence[Sequence[Spec]]):
        directory.mkdir(parents=True, exist_ok=True)
        storage.recover(directory)
        self._step = step
        self._target = directory / folder_name(step)
        self._folder = directory / f".{self._target.name}.writing"
        remove(self._folder)
        self._folder.mkdir()
        self._digests: list[str] = []
        with removed_on_failure(self._folder):
            self._ranks = RankFileWriter(self._folder / RANKS, specs)

    def write_rank(self, rank: int, piece: np.ndarray) -> None:
        """Writes the next bytes of the arrays that belong to one rank.

        Raises:
            OSError: writing failed; the draft is deleted.
        """
        with removed_on_failure(self._folder):
            self._ranks.write(rank, piece)

    def commit(self, tensors: dict[str, Any], manifest: Mapping[str, Any]) -> None:
        """Makes it the latest checkpoint: one of the same step is replaced, later ones are set aside.

        Args:
            tensors: TensorFlow or NumPy tensors by name. Each is removed when it has been read back, so that its memory
                is free.
            manifest: all other state, as JSON values.

        Raises:
            OSError, tf.errors.OpError: writing failed; earlier checkpoints are intact.
        """
        text = json.dumps({"format": storage.FORMAT, "step": self._step, **manifest}, indent=1) + "\n"
        with removed_on_failure(self._folder):
            digests = self._ranks.close()
            if self._target.exists() and storage.damage(self._target) is not None:
                storage.set_aside(self._target)
            if self._target.exists() and _holds(self._target, dict(tensors), text, digests):
                remove(self._folder)
            else:
                self._write(tensors, text, digests)
        storage.set_aside_later(self._target.parent, self._step)

    def _write(self, tensors: dict[str, Any], manifest: str, digests: Sequence[str]) -> None:
        _save(tensors, self._folder)
        (self._folder / MANIFEST).write_text(manifest)
        files = sorted(path.name for path in self._folder.iterdir())
        (self._folder / SUMS).write_text(storage.sums(self._folder, files))

        def verify(folder: Path) -> None:
            _verify(folder, tensors, digests)
            if self._target.exists():  # A folder cannot be renamed onto another one.
                self._target.rename(storage.replaced_path(self._target))

        commit(self._folder, self._target, verify)


def _save(tensors: Mapping[str, Any], folder: Path) -> None:
    """Writes tensors in TensorFlow's format, to several files if they are large: several threads verify them."""
    groups = _groups(tensors)
    parts = [str(folder / f"{TENSORS}.part{i}") for i in range(len(groups))]
    for part, names in zip(parts, groups, strict=True):
        values = [tf.convert_to_tensor(tensors[name]) for name in names]
        tf.raw_ops.SaveV2(prefix=part, tensor_names=names, shape_and_slices=[""] * len(names), tensors=values)
    # Renames the files.
    tf.raw_ops.MergeV2Checkpoints(
        checkpoint_prefixes=parts, destination_prefix=str(folder / TENSORS), delete_old_dirs=False
    )


def _groups(tensors: Mapping[str, Any]) -> list[list[str]]:
    """The names of tensors, in order, divided into the groups that are a file each."""
    sizes = {name: _bytes(value).nbytes for name, value in tensors.items()}
    enough = max(_MIN_FILE_BYTES, -(-sum(sizes.values()) // _MAX_FILES))
    groups: list[list[str]] = [[]]
    size = 0
    for name, own in sizes.items():
        if size >= enough:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += own
    return groups


def _holds(folder: Path, tensors: dict[str, Any], manifest: str, digests: Sequence[str]) -> bool:
    """Whether an intact checkpoint has exactly this content."""
    if (folder / MANIFEST).read_bytes() != manifest.encode():
        return False
    try:
        _verify(folder, tensors, digests)
    except (OSError, ValueError, LookupError, tf.errors.OpError):
        return False
    return True


def _verify(folder: Path, tensors: dict[str, Any], digests: Sequence[str]) -> None:
    """Removes the tensors that can be read back; raises OSError if one cannot.

    Training holds new values meanwhile. The largest tensor is compared by its digest, and makes room in memory for the
    others.
    """
    found = SharedTensors(folder / TENSORS)
    if tensors:
        largest = max(tensors, key=lambda name: _bytes(tensors[name]).nbytes)
        digest = _digest(tensors.pop(largest))
        _require_equal(largest, _digest(found[largest]) == digest)
    while tensors:
        name, value = tensors.popitem()
        _require_equal(name, _are_equal(_bytes(found[name]), _bytes(value)))
    if RankFileReader(folder / RANKS, len(digests)).digests() != list(digests):
        raise OSError(f"the data read back differs from the data written: {RANKS}")


def _require_equal(name: str, is_equal: bool) -> None:
    if not is_equal:
        raise OSError(f"the data read back differs from the data written: {name}")


def _digest(value: Any) -> bytes:
    return hashlib.sha256(_bytes(value).data).digest()


def _are_equal(one: np.ndarray, other: np.ndarray) -> bool:
    """Compares bytes in blocks: NumPy's comparison returns as many bytes as it receives."""
    starts = range(0, len(one), PIECE_BYTES)
    return len(one) == len(other) and all(
        np.array_equal(one[i : i + PIECE_BYTES], other[i : i + PIECE_BYTES]) for i in starts
    )


def _bytes(value: Any) -> np.ndarray:
    # As bytes, NaN equals NaN; a view copies nothing.
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)
