"""Reads JSON files that may be damaged."""

import json
from pathlib import Path
from typing import Any

from hvdtrain.system import bounded_files


def read_object(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file.

    Raises:
        OSError: the file is missing, not a regular one, too large, or cannot be read.
        ValueError: it does not hold a JSON object.
    """
    content = bounded_files.read_bytes(path)
    try:
        found = json.loads(content)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError(f"a JSON object is required, not {found!s:.40}")
    return found


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the JSON objects in a file with one on each line, without damaged lines.

    Raises:
        OSError: the file is missing, not a regular one, too large, or cannot be read.
    """
    return [found for line in bounded_files.read_lines(path) if (found := object_in(line)) is not None]


def object_in(line: bytes) -> dict[str, Any] | None:
    """The JSON object on a line; None if it is not one."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
