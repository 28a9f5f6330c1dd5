"""Files and folders that a reader sees whole or not at all."""

import os
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Writes a small file so that a reader sees the old or the new one, never half."""
    aside = path.with_name(f".{path.name}.writing")
    aside.write_text(text)
    sync(aside)
    aside.rename(path)


def sync(path: Path) -> None:
    """Has a file's content, or a folder's entries, reach the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Has a folder's files and its entries reach the disk."""
    for path in [*sorted(folder.iterdir()), folder]:
        sync(path)
