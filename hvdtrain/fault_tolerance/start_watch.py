"""Ends a job whose ranks do not all start; the job watch begins only when they have."""

import os
import threading
import time

from hvdtrain.config.wording import option
from hvdtrain.system import environment
from hvdtrain.system.supervisor_client import note_exit_code
from hvdtrain.system.terminal import report

# For the other ranks to report the same: their launcher ends them when the first one ends.
_REPORTING_S = 2.0
# Ranks import TensorFlow from a shared file system at different speeds, however short a step is.
MIN_TIMEOUT_S = 120.0


class StartWatch:
    """In the block, a rank that has waited too long for others reports this and ends the job with exit code 1.

    A rank that hangs, or never starts, is the one that does not report.

    Args:
        timeout_s: how long to wait, at least 120 s; 0: forever.
    """

    def __init__(self, timeout_s: float):
        self._timeout_s = max(timeout_s, MIN_TIMEOUT_S) if timeout_s else 0
        self._has_started = threading.Event()

    def __enter__(self) -> None:
        if self._timeout_s:
            threading.Thread(target=self._run, name="hvdtrain-start-watch", daemon=True).start()

    def __exit__(self, *error: object) -> None:
        self._has_started.set()

    def _run(self) -> None:
        if self._has_started.wait(self._timeout_s):
            return
        launcher = environment.launcher()
        report(
            launcher.rank,
            f"has waited {self._timeout_s:g} s for all ranks to start. A rank that does not report this hangs, "
            f"or has not reached hvdtrain.init(); {option('stall_timeout')} sets the time.",
        )
        time.sleep(_REPORTING_S)
        note_exit_code(1)
        os._exit(1)
