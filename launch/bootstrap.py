"""Creates this checkout's environment if it is missing or out of date, then runs a command in it.

Called by ``launch/run``; with ``--restarts``, ``restarts.py`` runs the command. Uses only the standard
library of Python 3.10 or later. Settings are environment variables: ``HVDTRAIN_PYTHON`` (the interpreter),
``HVDTRAIN_EXTRAS`` (optional dependencies, for instance ``mlflow,onnx``) and those of ``launch/horovod/backend.py``
(``HVDTRAIN_TENSORFLOW``, ``HVDTRAIN_MPI``, ``HOROVOD_GPU_OPERATIONS``), which stay in effect without being repeated
until ``.venvs`` is deleted; and ``HVDTRAIN_WHEELHOUSE``, a folder made by ``launch/wheelhouse``, which is installed
from alone.

``.venvs`` has an environment for each combination of settings and pinned versions that was used lately; ``.venv``
is a link to the current one. A new one never replaces files of an old one, in which jobs may be running. Development
tools are added when a command needs them.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

from installation import LOCKED, LOG, ROOT, add_development_tools, fail, make_environment, say
from installed_tensorflow import add_development_tools_on_top, make_environment_on_top
from restarts import OptionError, supervise, take_options

VENVS = ROOT / ".venvs"
CURRENT = ROOT / ".venv"
SETTINGS_FILE = VENVS / "settings.json"
# In an environment that is complete. Commands that run in it hold a shared lock of this file.
STAMP = "hvdtrain-environment.json"
# In an environment that has the development tools of the text in it.
TOOLS_STAMP = "hvdtrain-tools.toml"
LOCK = ROOT / ".venv.lock"
# A word of a command that needs development tools.
NEEDS_TOOLS = re.compile(r"(?:.*/)?(?:pytest|ruff|mypy|lint-imports|mkdocs)|(?:.*/)?(?:tests|benchmarks)(?:/.*)?")
# Only deliberate choices: MPI_HOME or CXX may differ between login and compute nodes, which must not rebuild the
# environment that other jobs are using.
SETTINGS = (
    "HVDTRAIN_TENSORFLOW",
    "HVDTRAIN_MPI",
    "HOROVOD_GPU_OPERATIONS",
    "HVDTRAIN_PYTHON",
    "HVDTRAIN_EXTRAS",
)


def wanted_environment() -> Path:
    """The environment for the current settings and versions; its path is part of its scripts."""
    digest = hashlib.sha256(str(ROOT).encode())
    digest.update(json.dumps(settings()).encode())
    digest.update(sections("[project", "[tool.uv").encode())
    for path in [LOCKED, *sorted((ROOT / "launch" / "horovod").glob("*.*"))]:
        digest.update(path.read_bytes())
    return VENVS / digest.hexdigest()[:12]


def sections(*headings: str) -> str:
    """The sections of pyproject.toml with these headings: a new linter rule must not trigger a new environment."""
    parts = re.split(r"^(?=\[)", (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    return "".join(each for each in parts if each.startswith(headings))


def settings() -> dict[str, str]:
    """The current settings; those that are not set keep their last value, and ``none`` takes one back."""
    try:
        previous = json.loads(SETTINGS_FILE.read_text())
    except (OSError, ValueError):
        # Chosen once: the nodes of a cluster need not all have a GPU.
        previous = gpu_settings()
    chosen = {name: os.environ.get(name) or previous.get(name, "") for name in SETTINGS}
    return {name: "" if value == "none" else value for name, value in chosen.items()}


def export(chosen: dict[str, str]) -> None:
    """Sets the environment variables that builds read."""
    for name, value in chosen.items():
        os.environ.pop(name, None)
        if value:
            os.environ[name] = value


def gpu_settings() -> dict[str, str]:
    """The settings for a machine with NVIDIA's driver: CUDA's libraries, and NCCL if it can be compiled."""
    if not Path("/proc/driver/nvidia/version").exists():
        return {}
    if folder := os.environ.get("HVDTRAIN_WHEELHOUSE"):
        return {"HVDTRAIN_EXTRAS": "cuda"} if any(Path(folder).glob("nvidia_cudnn*")) else {}
    toolkit = shutil.which("nvcc") or Path("/usr/local/cuda/bin/nvcc").exists()
    return {"HVDTRAIN_EXTRAS": "cuda", **({"HOROVOD_GPU_OPERATIONS": "NCCL"} if toolkit else {})}


def claim(venv: Path) -> bool:
    """Keeps an environment from being removed while this process runs, and the command that replaces it.

    Returns:
        Whether the environment is complete.
    """
    try:
        file = os.open(venv / STAMP, os.O_RDONLY)
    except OSError:
        return False
    os.set_inheritable(file, True)
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(file, fcntl.LOCK_SH)
    return (venv / STAMP).exists() and (venv / "bin" / "python").exists()


def make_current(venv: Path) -> None:
    """Links ``.venv`` to an environment, and removes those that are no longer used, except the previous one."""
    if CURRENT.is_symlink() and CURRENT.resolve() == venv:
        return
    previous = CURRENT.resolve()
    if CURRENT.is_dir() and not CURRENT.is_symlink():  # not made by this file
        previous = CURRENT.rename(VENVS / "earlier")
    link = VENVS / "new-link"
    link.unlink(missing_ok=True)
    link.symlink_to(venv.relative_to(ROOT))
    link.replace(CURRENT)
    for other in VENVS.iterdir():
        if other.is_dir() and other not in (venv, previous) and not is_in_use(other):
            shutil.rmtree(other, ignore_errors=True)


def is_in_use(venv: Path) -> bool:
    """Whether a command of this host runs in an environment."""
    try:
        with (venv / STAMP).open() as stamp:
            fcntl.flock(stamp, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:  # never completed
        return False
    except OSError:
        return True
    return False


def ensure_environment(*, with_tools: bool) -> Path:
    """The environment to run commands in; creates it if it is missing or out of date."""
    venv = wanted_environment()
    if claim(venv) and CURRENT.resolve() == venv and (has_tools(venv) or not with_tools):
        return venv
    try:
        lock = LOCK.open("w")
        VENVS.mkdir(exist_ok=True)
    except OSError as error:
        fail(f"{ROOT} must be writable on first use: {error}.", "Clone to a folder that you own.")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another launch/run is creating the environment; waiting for it.")
            fcntl.flock(lock, fcntl.LOCK_EX)
        chosen = settings()
        # A retry after a failure needs them.
        SETTINGS_FILE.write_text(json.dumps(chosen))
        export(chosen)
        on_top = chosen["HVDTRAIN_TENSORFLOW"] == "installed"
        with LOG.open("w") as log:
            if not claim(venv):
                (make_environment_on_top if on_top else make_environment)(venv, log)
                (venv / STAMP).write_text(json.dumps(chosen))
                claim(venv)
            make_current(venv)
            if with_tools and not has_tools(venv):
                (add_development_tools_on_top if on_top else add_development_tools)(venv, log)
                (venv / TOOLS_STAMP).write_text(sections("[dependency-groups]"))
        say("the environment is ready.")
    return venv


def has_tools(venv: Path) -> bool:
    try:
        return (venv / TOOLS_STAMP).read_text() == sections("[dependency-groups]")
    except OSError:
        return False


def environment(venv: Path) -> dict[str, str]:
    env = dict(os.environ)
    env["VIRTUAL_ENV"] = str(venv)
    env["PATH"] = os.pathsep.join([str(venv / "bin"), env.get("PATH", os.defpath)])
    env.pop("PYTHONHOME", None)
    env.setdefault("PYTHONHASHSEED", "0")  # Otherwise, sets of strings have another order on each rank.
    if os.geteuid() == 0:  # as in a container
        env.setdefault("OMPI_ALLOW_RUN_AS_ROOT", "1")
        env.setdefault("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    if not any(shutil.which(name, path=env["PATH"]) for name in ("ssh", "rsh")):
        # Open MPI looks for one of them even where all ranks are on this host.
        env.setdefault("OMPI_MCA_plm_rsh_agent", "/bin/false")
    # OMPI_MCA_odls_base_sigkill_timeout, the time to save after mpirun receives SIGTERM, is deliberately not set:
    # Open MPI waits for it twice, before SIGTERM and before SIGKILL, whenever a job fails or is stopped, even if all
    # ranks have already exited. With 10, ending a job took 20 s (with 1, the default: 2 s).
    return env


def main(arguments: list[str]) -> None:
    try:
        options, command = take_options(arguments)
    except OptionError as error:
        fail(*error.args)
    if command[:1] == ["--elastic"]:
        command = ["python", "-m", "hvdtrain", "elastic", *command[1:]]
    if not command:
        fail(
            "a command is missing.",
            "For example: launch/run horovodrun -np 2 python -m hvdtrain · launch/run pytest",
        )
    # The default action of SIGTERM would leave the installer running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    venv = ensure_environment(with_tools=any(map(NEEDS_TOOLS.fullmatch, command)))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    env = environment(venv)
    program = shutil.which(command[0], path=env["PATH"])
    if program is None:
        say(f"command not found: {command[0]}")
        raise SystemExit(127)
    if options is None:
        os.execve(program, command, env)
    raise SystemExit(supervise(program, command, env, options, say))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
