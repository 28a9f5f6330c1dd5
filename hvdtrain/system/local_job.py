"""Jobs on this machine: the number of ranks, and the command that starts them."""

import dataclasses
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import psutil

from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.system import environment
from hvdtrain.system.cores import usable_cores

Controller = Literal["auto", "mpi", "gloo"]
"""What the ranks communicate with; auto: MPI if Horovod was built with it."""

MAX_CPU_RANKS = 8
"""Number of ranks that is chosen at most without GPUs; each takes some hundred MiB of memory."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """A command to execute, and its environment."""

    command: list[str]
    env: Mapping[str, str]


def choose_ranks() -> tuple[int, str]:
    """The number of ranks for this machine, and the reason."""
    if gpus := count_gpus():
        return gpus, "one for each GPU"
    cores = min(usable_cores(), psutil.cpu_count(logical=False) or usable_cores())
    return min(cores, MAX_CPU_RANKS), f"one for each physical core, at most {MAX_CPU_RANKS}"


def count_gpus() -> int:
    """The number of NVIDIA GPUs that programs on this machine may use; TensorFlow is not needed to count them."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    try:
        listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = sum(line.startswith("GPU ") for line in listed.splitlines())
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    return found if visible is None else min(found, num_visible(visible))


def num_visible(visible: str) -> int:
    """How many GPUs ``CUDA_VISIBLE_DEVICES`` names."""
    # CUDA ignores what follows an invalid entry, such as -1.
    names = visible.split(",")
    return next((i for i, name in enumerate(names) if not name.strip() or name.strip().startswith("-")), len(names))


def make_launch(command: Sequence[str], ranks: int, controller: Controller = "auto") -> Launch:
    """How to start a command on ranks of this machine, by horovodrun.

    Raises:
        UsageError: this process is itself a rank of a job.
        HvdtrainError: Horovod is not installed.
    """
    started_by = environment.launcher()
    if started_by.name != "none":
        raise UsageError(
            f"a rank of a job must not start another job. Received: a process that {started_by.name} started as rank "
            f"{started_by.rank}. Call it without a launcher."
        )
    env = environment.launch_environment()
    if importlib.util.find_spec("horovod") is None:
        raise HvdtrainError(
            "hvdtrain-horovod must be installed for this Python. Received: a Python without it. Use launch/run, which "
            "installs it."
        )
    # The command horovodrun of this Python, in an environment that is not activated too.
    launcher = [sys.executable, "-m", "horovod.runner.command"]
    backend = [] if controller == "auto" else [f"--{controller}"]
    program = _runnable(command, env["PATH"])
    return Launch([*launcher, "-np", str(ranks), *backend, *program], env)


def _runnable(command: Sequence[str], path: str) -> list[str]:
    """The command, with Python before a script."""
    program, *arguments = command
    if program.endswith(".py"):
        if not Path(program).is_file():
            raise UsageError(f"the program to start must exist. Received: {program!r}, and there is no such file.")
        return [sys.executable, program, *arguments]
    if shutil.which(program, path=path) is None:
        raise UsageError(
            f"the command to start must be a program on PATH or a .py file. Received: {program!r}. For example: "
            "python -m hvdtrain"
        )
    return [program, *arguments]
