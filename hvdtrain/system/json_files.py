"""Reads JSON files that may be damaged."""

import json
from pathlib import Path
from typing import Any

from hvdtrain.system.atomic_files import require_regular


def read_object(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file.

    Raises:
        OSError: the file is missing, not a regular one, or cannot be read.
        ValueError: it does not hold a JSON object.
    """
    require_regular(path)
    try:
        content = json.loads(path.read_bytes())
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError(f"a JSON object is required, not {content!s:.40}")
    return content


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the JSON objects in a file with one on each line, without damaged lines.

    Raises:
        OSError: the file is missing, not a regular one, or cannot be read.
    """
    require_regular(path)
    return [found for line in path.read_bytes().splitlines() if (found := object_in(line)) is not None]


def object_in(line: bytes) -> dict[str, Any] | None:
    """The JSON object on a line; None if it is not one."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
