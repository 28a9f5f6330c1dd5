"""A file of JSON lines, one for each event of a run, that a resumed run continues."""

import errno
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.system import bounded_files
from hvdtrain.system.atomic_files import replaced_on_success, require_regular
from hvdtrain.system.json_files import object_in


class EventFile:
    """Appends events to a file. A line is there completely or not at all.

    All methods raise OSError if the file cannot be read or written.
    """

    def __init__(self, path: Path):
        self._path = path

    def append(self, event: str, values: Mapping[str, Any]) -> None:
        """Writes a line with the event's name, the time, and values."""
        line = (json.dumps({"event": event, "time": time.time(), **values}) + "\n").encode()
        require_regular(self._path)
        with self._path.open("ab", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            try:
                written = file.write(line)
                if written < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                file.truncate(size)  # a partial line would corrupt the next one too
                raise

    def remove_after(self, step: int) -> float:
        """Removes the lines of steps that will run, and be logged, again; returns the seconds elapsed before them."""
        require_regular(self._path)
        if not self._path.exists():
            return 0.0
        lines = bounded_files.read_lines(self._path)
        # A line that is not an object is incomplete: its process was killed while writing it.
        events = [(line, event) for line in lines if (event := object_in(line)) is not None and _is_up_to(event, step)]
        with replaced_on_success(self._path) as aside:
            aside.write_bytes(b"".join(line for line, _ in events))
        elapsed = [event.get("elapsed_seconds") for _, event in events]
        return max((value for value in elapsed if isinstance(value, int | float) and math.isfinite(value)), default=0.0)


def _is_up_to(event: Mapping[str, Any], step: int) -> bool:
    its_step = event.get("step", 0)
    return isinstance(its_step, int | float) and its_step <= step
