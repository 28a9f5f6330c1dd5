"""Starts a benchmark's own script on several ranks, and collects what each of them has measured."""

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

_MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np"]
_MARK = "MEASURED "


def tell(measured: dict[str, Any]) -> None:
    """On a rank: prints what it has measured, with its number as ``rank``, for :func:`measured_on_ranks`."""
    print(_MARK + json.dumps(measured), flush=True)


def measured_on_ranks(
    ranks: int, script: str, *arguments: str, launcher: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """Runs a script on ranks; returns what they have told, by rank. Exits if one of them failed.

    Args:
        launcher: the command that starts it (default: ``mpirun`` on this host).
    """
    command = [*(launcher or [*_MPIRUN, str(ranks)]), sys.executable, script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    # Ranks write at the same time, sometimes in the same line.
    found = [json.JSONDecoder().raw_decode(part)[0] for part in done.stdout.split(_MARK)[1:]]
    if done.returncode or len(found) != ranks:
        sys.exit(f"{' '.join(arguments)} on {ranks} ranks failed:\n{done.stdout}\n{done.stderr}")
    return sorted(found, key=lambda each: each["rank"])
