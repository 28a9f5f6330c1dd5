"""``hvdtrain check``: the first steps of a program on several ranks, compared with those of one process."""

import contextlib
import shlex
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

import psutil

from hvdtrain.commands.launch import controller_of
from hvdtrain.config.fields import broken_rule
from hvdtrain.errors import UnequalError, UsageError
from hvdtrain.system.environment import ONLY_CHECK
from hvdtrain.system.local_job import make_launch

_NOT_COMPARED = (
    "hvdtrain check: no training step was compared. The program must call hvdtrain.init(), and train with "
    "hvdtrain.DistributedOptimizer or hvdtrain.Trainer."
)


def run(command: Sequence[str], *, np: str = "2", mpi: bool = False, gloo: bool = False) -> int:
    """Starts a job that ends after the checked steps.

    Returns:
        The job's exit code, or another one than 0 if the program ended before a step was compared.

    Raises:
        UsageError: there is no command, or an option breaks its rule.
        HvdtrainError: Horovod is not installed.
    """
    if not (np.isascii() and np.isdigit() and int(np[:9]) > 1):
        raise broken_rule("np", "a whole number of at least 2", np)
    if not command:
        raise UsageError("a program is missing. For example: hvdtrain check --np 2 train.py")
    job = make_launch(command, int(np), controller_of(mpi, gloo))
    print(f"hvdtrain check: {np} ranks: {shlex.join(command)}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        compared = Path(folder) / "compared"
        code = _exit_code(job.command, {**job.env, ONLY_CHECK: str(compared)})
        if code != 0 or compared.exists():
            return code
    print(_NOT_COMPARED, file=sys.stderr, flush=True)
    return UnequalError.exit_code


def _exit_code(command: Sequence[str], env: Mapping[str, str]) -> int:
    """That of a job, as a shell reports it; what stops this process stops the job."""
    job = psutil.Popen(command, env=env)

    def stop(number: int, frame: FrameType | None) -> None:
        # Also mpirun: horovodrun is a shell by then, which ends without it.
        for process in [*job.children(recursive=True), job]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # A terminal sends it to the job as well.
    signal.signal(signal.SIGTERM, stop)
    code = job.wait()
    return code if code >= 0 else 128 - code
