"""Checkpoints, written by rank 0: complete or absent, never half."""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

MANIFEST = "manifest.json"


def write_checkpoint(directory: Path, model: keras.Model, facts: dict[str, Any]) -> Path:
    """Writes weights and optimizer in TensorFlow's checkpoint format, below ``directory/step-…``.

    Written aside, synced to disk and renamed into place; a manifest holds the SHA-256 of each file.

    Args:
        facts: what else the manifest is to hold; ``step`` names the folder.

    Returns:
        The folder of the checkpoint.

    Raises:
        OSError: the file system refused, or there is a checkpoint of this step; earlier ones are untouched.
    """
    target = directory / f"step-{facts['step']:08d}"
    aside = directory / f".{target.name}.writing"
    directory.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(str(aside / "state"))
    files = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(aside.iterdir())}
    (aside / MANIFEST).write_text(json.dumps({**facts, "sha256": files}, indent=2) + "\n")
    for path in [*aside.iterdir(), aside]:
        _sync(path)
    aside.rename(target)
    _sync(directory)
    return target


def write_text(path: Path, text: str) -> None:
    """Writes a small file so that a reader sees the old or the new one, never half."""
    aside = path.with_name(f".{path.name}.writing")
    aside.write_text(text)
    _sync(aside)
    aside.rename(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
