"""Folders of checkpoints: what a checkpoint consists of, which are intact, and which are kept.

A checkpoint ``step-00000120/`` contains

* ``state.index``, ``state.data-00000-of-00001``: the tensors that all ranks have in common, or their average, in
  TensorFlow's checkpoint format (``tf.train.load_checkpoint(folder / "state")``); more files of data if they are large,
* ``ranks.safetensors``: the tensors that belong to single ranks, see :mod:`hvdtrain.checkpoint.rank_file`,
* ``manifest.json``: a description of the tensors, and all state that is not a tensor,
* ``SHA256SUMS``: the digests of these files, in the format of ``sha256sum --check``.
"""

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

from hvdtrain.checkpoint.joined_parts import JoinedParts
from hvdtrain.checkpoint.rank_file import RankFileReader
from hvdtrain.checkpoint.shared_tensors import SharedTensors
from hvdtrain.config.wording import option
from hvdtrain.errors import DataError
from hvdtrain.system.atomic_files import remove
from hvdtrain.system.bounded_files import read_bytes
from hvdtrain.system.cores import usable_cores
from hvdtrain.system.json_files import read_object
from hvdtrain.system.terminal import report

FORMAT = 1
MANIFEST, SUMS, TENSORS, RANKS = "manifest.json", "SHA256SUMS", "state", "ranks.safetensors"
_NAME = re.compile(r"step-(\d{8,})")
_OURS = re.compile(r"\.?step-\d{8,}(\.(writing|deleting|replaced|aside\d*))?")


def folder_name(step: int) -> str:
    """Returns the name of the checkpoint of a step."""
    return f"step-{step:08d}"


def step_of(folder: Path) -> int:
    """Returns the step of a checkpoint from its name."""
    match = _NAME.fullmatch(folder.name)
    assert match is not None, folder
    return int(match[1])


def is_checkpoint(name: str) -> bool:
    """Whether a folder's name is that of a checkpoint."""
    return _NAME.fullmatch(name) is not None


def checkpoints_in(directory: Path) -> list[Path]:
    """Returns the checkpoints in a folder, intact or damaged, in order of steps."""
    if not directory.is_dir():
        return []
    return sorted((path for path in directory.iterdir() if _NAME.fullmatch(path.name)), key=step_of)


def require_ours(directory: Path) -> None:
    """Raises DataError if checkpoints must not be written to a path; changes nothing."""
    if directory.exists() and not directory.is_dir():
        raise DataError(f"checkpoints must go to a folder. Received: {directory}, a file. Use another path.")
    if directory.is_dir():
        names = [path.name for path in directory.iterdir()]
        if names and not any(_OURS.fullmatch(name) for name in names):
            raise DataError(
                "checkpoints must go to a new or empty folder, or one that holds checkpoints. Received: "
                f"{directory}, which holds something else ({min(names)}). It was left untouched; use another folder."
            )


def recover(directory: Path) -> None:
    """Completes the replacement of a checkpoint that was interrupted before the new one was in its place."""
    for old in directory.glob(".step-*.replaced"):
        target = old.with_name(old.name.removeprefix(".").removesuffix(".replaced"))
        if target.exists():
            remove(old)
        elif _NAME.fullmatch(target.name):
            old.rename(target)


def sums(folder: Path, names: Sequence[str], *, threads: int = 1) -> str:
    """The content of ``SHA256SUMS`` for these files."""
    with ThreadPoolExecutor(threads) as pool:
        digests = pool.map(_sha256, [folder / name for name in names])
        return "".join(f"{digest}  {name}\n" for digest, name in zip(digests, names, strict=True))


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def listed_files(folder: Path) -> list[str]:
    """Returns the names of the files that ``SHA256SUMS`` lists; raises OSError if it cannot be read."""
    return [line[66:] for line in read_bytes(folder / SUMS).decode(errors="replace").splitlines()]


def damage(folder: Path) -> str | None:
    """Returns what is wrong with the files of a checkpoint; None if it is intact.

    Files that are not listed in ``SHA256SUMS`` are ignored: file managers and network file systems leave some.
    """
    try:
        if missing := _missing(folder, [MANIFEST, f"{TENSORS}.index", RANKS, SUMS]):
            return f"{missing} is missing"
        expected, listed = read_bytes(folder / SUMS), listed_files(folder)
        if missing := _missing(folder, listed):
            return f"{missing}, listed in {SUMS}, is missing"
        if unlisted := {MANIFEST, f"{TENSORS}.index", RANKS} - set(listed):
            return f"{SUMS} does not list {', '.join(sorted(unlisted))}"
        # The other ranks wait meanwhile.
        found = sums(folder, listed, threads=usable_cores())
    except OSError as error:
        return str(error)
    if expected == found.encode():
        return None
    lines = zip(expected.decode(errors="replace").splitlines(), found.splitlines(), strict=True)
    wrong = [name for name, (one, other) in zip(listed, lines, strict=True) if one != other]
    return f"{', '.join(wrong) or 'the content'} does not match {SUMS}"


def _missing(folder: Path, names: Sequence[str]) -> str:
    return ", ".join(name for name in names if not (folder / name).is_file())


def read(folder: Path) -> "Content":
    """Opens an intact checkpoint.

    Raises:
        DataError: it was written by a newer version.
        MalformedError: hvdtrain did not write it.
    """
    manifest = read_manifest(folder)
    with refusing_malformed(TENSORS):
        tensors = SharedTensors(folder / TENSORS)
    with refusing_malformed(RANKS):
        ranks = RankFileReader(folder / RANKS, int(manifest["ranks"]))
    with refusing_malformed(MANIFEST):
        return Content(folder, manifest, JoinedParts(tensors, ranks, manifest), ranks)


class Content(NamedTuple):
    """The content of a checkpoint."""

    path: Path
    manifest: dict[str, Any]
    tensors: JoinedParts
    """State that all ranks have in common, its average over ranks, or tensors joined from their parts."""
    ranks: RankFileReader
    """Per-rank state."""


def read_manifest(folder: Path) -> dict[str, Any]:
    """Returns the manifest of an intact checkpoint; raises what :func:`read` raises."""
    with refusing_malformed(MANIFEST):
        manifest = read_object(folder / MANIFEST)
        version, step = int(manifest["format"]), int(manifest["step"])
        if step != step_of(folder):
            raise ValueError(f"it is of step {step}")
    if version > FORMAT:
        by = manifest.get("versions")
        raise DataError(
            f"a checkpoint must have format {FORMAT} or earlier. Received: {folder}, format {version}, written by "
            f"hvdtrain {by.get('hvdtrain') if isinstance(by, dict) else '(later version)'}. It was left untouched; use "
            f"that version, or another {option('run_dir', argument='folder')}."
        )
    return manifest


class MalformedError(Exception):
    """The files of a checkpoint are intact, but hvdtrain did not write them; the message is the cause."""


@contextmanager
def refusing_malformed(name: str) -> Iterator[None]:
    """Turns the errors of code that reads a manifest, or what it describes, into MalformedError."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, OSError, tf.errors.OpError) as error:
        raise MalformedError(f"{name} is not as hvdtrain writes it ({type(error).__name__}: {error})") from error


def replaced_path(folder: Path) -> Path:
    """The temporary path of a checkpoint that is being replaced by a new one of the same step."""
    return folder.with_name(f".{folder.name}.replaced")


def set_aside(folder: Path) -> Path:
    """Renames a checkpoint so that it is no longer found as one; does not delete it."""
    number = 1
    while (target := folder.with_name(f"{folder.name}.aside{number}")).exists():
        number += 1
    folder.rename(target)
    return target


def set_aside_later(directory: Path, step: int) -> None:
    """Renames the checkpoints of later steps: the run that resumes from this step writes them again."""
    for later in checkpoints_in(directory):
        if step_of(later) > step:
            renamed = set_aside(later)
            report(0, f"step {step} is now the latest: renamed the later checkpoint {later} to {renamed.name}")


def delete_all_but(directory: Path, keep: int) -> None:
    """Deletes all but the latest checkpoints, replaced ones, and the remains of interrupted writes and deletions."""
    for folder in checkpoints_in(directory)[:-keep]:
        if folder.is_symlink() or os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
            # Renamed first: readers must not find a partly deleted checkpoint.
            folder.rename(directory / f".{folder.name}.deleting")
    for leftover in directory.glob(".step-*"):
        if _OURS.fullmatch(leftover.name):
            with suppress(OSError):  # The next save tries again.
                remove(leftover)
