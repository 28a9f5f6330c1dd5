"""Reads small JSON files that may be damaged."""

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
