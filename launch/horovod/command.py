"""The command horovodrun of hvdtrain-horovod: Horovod's own without its check of how Horovod was built, which imports
TensorFlow and takes seconds, without the user's environment on command lines, without abbreviated options, without a
traceback of its own when a rank fails, and without tags before lines on a terminal, where hvdtrain draws a progress
bar. Its rendezvous over Gloo answers only requests with a token."""

# ruff: noqa: E402
import signal

# Ctrl-C during imports would print a traceback.
signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import functools
import os
import secrets
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

from horovod.common import util
from horovod.runner import gloo_run, mpi_run
from horovod.runner.common.util import env as env_util
from horovod.runner.forwarded import FORWARDED
from horovod.runner.http import http_server

# The build of hvdtrain-horovod always has both.
util.mpi_built = util.gloo_built = lambda verbose=False: True

# With Gloo, it writes the environment to the command line of each rank, which all users of the host can read. Ranks on
# this host inherit it anyway; those on others receive what a job needs.
gloo_run.env_util = SimpleNamespace(is_exportable=lambda name: FORWARDED.fullmatch(name) is not None)


def execute_untagged(path: str, arguments: Sequence[str], env: Mapping[str, str]) -> None:
    """os.execve for ``/bin/sh -c "mpirun --tag-output …"``."""
    *words, command = arguments
    os.execve(path, [*words, command.replace("--tag-output ", "", 1)], env)


if sys.stdout.isatty():
    # A tag before each line moves a progress bar out of place.
    mpi_run.os = SimpleNamespace(**{**vars(os), "execve": execute_untagged})

TOKEN = "HOROVOD_RENDEZVOUS_TOKEN"
plain_remote_command = gloo_run.get_remote_command


def remote_command(command: str, **options: object) -> str:
    """The command that starts a rank on another host, with secrets in its input: all users can read command lines.

    Secrets are the token, and variables that a user names, for which ``HVDTRAIN_FORWARDED`` has their names.
    """
    names = [TOKEN, *os.environ.get("HVDTRAIN_FORWARDED", "").split()]
    values = " ".join(f'"${name}"' for name in names)
    read = "".join(f"IFS= read -r {name} && export {name} && " for name in names)
    return f'printf "%s\\n" {values} | ' + plain_remote_command(shlex.quote(read) + command, **options)


def protect_rendezvous() -> None:
    """Makes the rendezvous of Gloo ask for a token, which ranks receive in their environment."""
    if not env_util.is_kubeflow_mpi():  # kubectl exec passes no input on
        http_server.RendezvousHandler.token = os.environ[TOKEN] = secrets.token_hex(16)
        gloo_run.get_remote_command = remote_command


# It copies names that were replaced above.
from horovod.runner import launch

# It would take an option of the command, such as --timeline, for an abbreviation of one of its own.
without_abbreviations = functools.partial(argparse.ArgumentParser, allow_abbrev=False)
launch.argparse = SimpleNamespace(**{**vars(argparse), "ArgumentParser": without_abbreviations})


def main() -> None:
    if not (shutil.which("ssh") or shutil.which("rsh")):
        # Open MPI looks for one of them even where all ranks are on this host, as in a small container.
        os.environ.setdefault("OMPI_MCA_plm_rsh_agent", "/bin/false")
    # Not above: the processes that horovodrun spawns import this module too.
    protect_rendezvous()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        sys.exit(launch.run_commandline())
    except KeyboardInterrupt:
        sys.exit(130)
    except RuntimeError as error:
        # With Gloo, of a rank that failed; the traceback would be that of this program.
        sys.exit(f"horovodrun: {error}")


if __name__ == "__main__":
    main()
