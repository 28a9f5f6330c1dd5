"""What this process tells ``launch/run --restarts``, which starts its job again when it dies.

The supervisor has named a file: a JSON object, see ``launch/restarts.py``. All ranks of its host write to the same
one. Nothing happens where there is no supervisor, or where the file cannot be written: on another host.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Callable
from typing import Any

from hvdtrain import process
from hvdtrain.files import write_text


def note_exit_code(code: int) -> None:
    """Says which documented exit code the job ends with, whatever its launcher makes of it.

    The first one stays, unless it is 1: that may be what a rank meets because another one has failed.
    """
    _change(lambda told: told if told.get("exit_code", 1) != 1 else {**told, "exit_code": code})


def note_checkpoint(step: int) -> None:
    """Says which step can be resumed from: the job makes progress."""
    _change(lambda told: {**told, "checkpoint_step": step})


def note_listener() -> None:
    """Says that a signal to this process stops the job in order; the supervisor passes its own on to it."""
    _change(lambda told: {**told, "listener": os.getpid()})


def _change(change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    file = process.supervisor_file()
    if file is None:
        return
    with contextlib.suppress(OSError), file.with_name(f"{file.name}.lock").open("w") as lock:
        # Given back by the system when this process dies.
        fcntl.flock(lock, fcntl.LOCK_EX)
        told = json.loads(file.read_text()) if file.exists() else {}
        write_text(file, json.dumps(change(told)))
