"""Processes on other hosts, started by ssh."""

import contextlib
import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence

# Reads the environment from stdin: command lines are readable by all users of both hosts. The process ends with the
# connection, even if it is stopped. Without "<&3", sh would connect a background command to /dev/null.
_SCRIPT = """
while IFS= read -r line && [ -n "$line" ]; do export "$line"; done
cd {folder} || exit 64
exec 3<&0
{command} </dev/null 3<&- & job=$!
(cat <&3 >/dev/null; kill -KILL "$job") >/dev/null 2>&1 & watch=$!
wait "$job"; code=$?
kill "$watch" 2>/dev/null
exit "$code"
"""
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15")


def forwarded(env: Mapping[str, str], more: Sequence[str] = ()) -> dict[str, str]:
    """The variables that a job may need on other hosts, and ``more``; all others may be secrets."""
    from horovod.runner.forwarded import FORWARDED  # not above: most processes start none

    return {name: value for name, value in env.items() if FORWARDED.fullmatch(name) or name in more}


def start_remote(host: str, command: Sequence[str], env: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    """Starts a command on another host, in the folder of the same path as this process's.

    Args:
        env: variables to set there; those whose value has several lines are left out.

    Returns:
        The ssh client, with the exit code of the command, or 255 if the host cannot be reached. If it is killed, so is
        the command.
    """
    script = _SCRIPT.format(folder=shlex.quote(os.getcwd()), command=shlex.join(command))
    process = subprocess.Popen(
        [*_SSH, host, f"sh -c {shlex.quote(script)}"], stdin=subprocess.PIPE, start_new_session=True
    )
    lines = [f"{name}={value}" for name, value in env.items() if "\n" not in value]
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # It has ended already, with a message.
        process.stdin.write("\n".join([*lines, "", ""]).encode())
        process.stdin.flush()
    return process
