"""Reports this process's progress and exit code to ``launch/run --restarts``, which restarts the job when it fails.

The supervisor names a file that holds a JSON object, see ``launch/restarts.py``; all ranks on its host write to it.
Without a supervisor, or on another host, where the file cannot be written, these functions do nothing.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Callable
from typing import Any

from hvdtrain.system import environment
from hvdtrain.system.atomic_files import write_text
from hvdtrain.system.json_files import read_object


def note_exit_code(code: int) -> None:
    """Reports the documented exit code of the job, which its launcher may replace with another one.

    The first code is kept unless it is 1: a rank may exit with 1 because another one has failed.
    """
    _update(lambda status: status if status.get("exit_code", 1) != 1 else {**status, "exit_code": code})


def note_checkpoint(step: int) -> None:
    """Reports the step of a complete checkpoint: the job makes progress."""
    _update(lambda status: {**status, "checkpoint_step": step})


def note_listener() -> None:
    """Reports that a signal to this process stops the job in order; the supervisor forwards signals to it."""
    _update(lambda status: {**status, "listener": os.getpid()})


def _update(change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    file = environment.supervisor_file()
    if file is None:
        return
    with contextlib.suppress(OSError), file.with_name(f"{file.name}.lock").open("w") as lock:
        # The kernel releases the lock if this process dies.
        fcntl.flock(lock, fcntl.LOCK_EX)
        status: dict[str, Any] = {}
        with contextlib.suppress(FileNotFoundError, ValueError):
            status = read_object(file)
        write_text(file, json.dumps(change(status)))
