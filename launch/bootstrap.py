"""Creates this checkout's environment if it is missing or out of date, then runs a command in it.

Called by ``launch/run``; with ``--restarts``, ``restarts.py`` runs the command. Uses only the standard
library of Python 3.10 or later. Settings are environment variables: ``HVDTRAIN_PYTHON`` (the interpreter) and
those of ``launch/horovod/backend.py`` (``HVDTRAIN_MPI``, ``HOROVOD_GPU_OPERATIONS``). A setting stays in effect
without being repeated until ``.venvs`` is deleted.

``.venvs`` has an environment for each combination of settings and pinned versions that was used lately; ``.venv``
is a link to the current one. A new one never replaces files of an old one, in which jobs may be running.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import NoReturn, TextIO

from restarts import OptionError, supervise, take_options

ROOT = Path(__file__).resolve().parent.parent
VENVS = ROOT / ".venvs"
CURRENT = ROOT / ".venv"
SETTINGS_FILE = VENVS / "settings.json"
# In an environment that is complete. Commands that run in it hold a shared lock of this file.
STAMP = "hvdtrain-environment.json"
LOCK = ROOT / ".venv.lock"
UV_HOME = ROOT / ".venv.uv"
INPUTS = ("pyproject.toml", "launch/horovod/pyproject.toml", "launch/horovod/backend.py", "launch/horovod/horovod.txt")
# Only deliberate choices: MPI_HOME or CXX may differ between login and compute nodes, which must not rebuild the
# environment that other jobs are using.
SETTINGS = ("HVDTRAIN_MPI", "HOROVOD_GPU_OPERATIONS", "HVDTRAIN_PYTHON")
# Measured: 2.4 GB in the package cache; the environment shares its files if it is on the same disk.
NEEDED_DISK_GB = 5
PROGRESS_EVERY_S = 15
FAILURE_LINES_SHOWN = 30


def say(message: str) -> None:
    print(f"launch/run: {message}", file=sys.stderr, flush=True)


def fail(rule: str, remedy: str) -> NoReturn:
    say(rule)
    say(remedy)
    raise SystemExit(1)


def wanted_environment() -> Path:
    """The environment for the current settings and versions; its path is part of its scripts."""
    digest = hashlib.sha256(str(ROOT).encode())
    digest.update(json.dumps(settings()).encode())
    for name in INPUTS:
        text = (ROOT / name).read_text()
        digest.update((installation_sections(text) if name == "pyproject.toml" else text).encode())
    return VENVS / digest.hexdigest()[:12]


def installation_sections(pyproject: str) -> str:
    """The sections of pyproject.toml that affect the installation: a new linter rule must not trigger a rebuild."""
    sections = re.split(r"^(?=\[)", pyproject, flags=re.MULTILINE)
    return "".join(each for each in sections if each.startswith(("[project", "[dependency-groups]", "[tool.uv")))


def settings() -> dict[str, str]:
    """The current settings; those that are not set keep their last value."""
    try:
        previous = json.loads(SETTINGS_FILE.read_text())
    except (OSError, ValueError):
        previous = {}
    return {name: os.environ.get(name) or previous.get(name, "") for name in SETTINGS}


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
    """Links ``.venv`` to an environment, and removes those that are no longer used, but for the last."""
    if CURRENT.is_symlink() and CURRENT.resolve() == venv:
        return
    previous = CURRENT.resolve()
    if CURRENT.is_dir() and not CURRENT.is_symlink():  # made by an earlier version of this file
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


def check_compiler() -> None:
    compiler = os.environ.get("CXX", "")
    found = shutil.which(compiler) if compiler else next(filter(None, map(shutil.which, ("c++", "g++"))), None)
    missing = [name for name, path in (("a C++ compiler", found), ("make", shutil.which("make"))) if not path]
    if missing:
        fail(
            f"building Horovod needs {' and '.join(missing)}, not found"
            + (f" (CXX={compiler})." if compiler else " on PATH."),
            "Debian, Ubuntu: apt install g++ make · Fedora: dnf install gcc-c++ make · a cluster: module load gcc",
        )


def check_disk_space() -> None:
    cache = Path(os.environ.get("UV_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    for folder, remedy in (
        (ROOT, "Free some space, or clone to a larger disk."),
        (cache, "Free some space, or set a cache folder on a larger disk: UV_CACHE_DIR=/path launch/run …"),
    ):
        while not folder.exists():
            folder = folder.parent
        free_gb = shutil.disk_usage(folder).free / 1e9
        if free_gb < NEEDED_DISK_GB:
            fail(f"the environment needs {NEEDED_DISK_GB} GB of disk. Free in {folder}: {free_gb:.1f} GB.", remedy)


def run_step(what: str, command: list[str], log: TextIO) -> None:
    """Runs one step of the set-up. Its output goes to the log; progress is printed every few seconds."""
    say(what)
    lines: deque[str] = deque(maxlen=400)
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    )
    ended = threading.Event()
    progress = threading.Thread(target=show_progress, args=(what, lines, ended))
    progress.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            lines.append(line)
        process.wait()
    finally:
        ended.set()
        progress.join()
        if process.poll() is None:
            process.terminate()
    if process.returncode != 0:
        log.flush()
        sys.stderr.writelines(list(lines)[-FAILURE_LINES_SHOWN:])
        explain("".join(lines).lower(), Path(log.name))


def show_progress(what: str, lines: deque[str], ended: threading.Event) -> None:
    """Prints progress regularly, so that a build of several minutes does not look like a hang."""
    began_s = time.monotonic()
    while not ended.wait(PROGRESS_EVERY_S):
        last = lines[-1].strip() if lines else ""
        say(f"still {what[0].lower()}{what[1:]}: {time.monotonic() - began_s:.0f} s{'; ' if last else ''}{last[:80]}")


def explain(output: str, log: Path) -> NoReturn:
    """Fails with the cause found in the output."""
    network = (
        *("dns error", "failed to fetch", "error sending request", "failed to establish a new connection"),
        *("connection refused", "temporary failure in name resolution", "read timed out", "connect timeout"),
    )
    if "no space left" in output:
        fail("the disk is full.", f"Free at least {NEEDED_DISK_GB} GB and run launch/run again.")
    if any(sign in output for sign in network):
        fail(
            "the package index could not be reached.",
            "On a compute node without internet: run launch/run true on the login node first. Elsewhere, check the "
            "network or proxy (HTTPS_PROXY), or set your site's mirror: UV_INDEX_URL=… PIP_INDEX_URL=…",
        )
    fail(f"the set-up failed; the full output is in {log}.", "Fix the reported problem and run launch/run again.")


def find_uv(log: TextIO) -> list[str]:
    """Finds uv on PATH, or installs it from PyPI into the checkout."""
    if uv := shutil.which("uv"):
        return [uv]
    own = UV_HOME / "bin" / "uv"
    if not own.exists():
        if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode == 0:
            install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            run_step("Installing uv", [*install, "--upgrade", "--target", str(UV_HOME), "uv"], log)
        else:
            fail(
                f"neither uv nor pip was found for {sys.executable}.",
                "Debian, Ubuntu: apt install python3-pip · elsewhere: put uv (docs.astral.sh/uv) on PATH",
            )
    return [str(own)]


def make_environment(venv: Path, log: TextIO) -> None:
    check_compiler()
    check_disk_space()
    uv = find_uv(log)
    chosen = settings()
    os.environ.update({name: value for name, value in chosen.items() if value})
    base = getattr(sys, "_base_executable", sys.executable)
    run_step(
        f"Creating the environment in {venv.relative_to(ROOT)}",
        [*uv, "venv", "--quiet", "--clear", "--python", base, str(venv)],
        log,
    )
    # Compiling bytecode takes 15 s here. If PYTHONDONTWRITEBYTECODE is set, as in many containers, or the folder is
    # read-only for ranks, every start of every rank would otherwise compile TensorFlow again (5 s).
    install = [*uv, "pip", "install", "--compile-bytecode", "--python", str(venv / "bin" / "python")]
    if chosen["HVDTRAIN_MPI"] == "site":
        # The cache does not distinguish between different MPIs of a site.
        install += ["--refresh-package", "horovod"]
    run_step(
        "Installing TensorFlow, and Horovod, which takes 2 minutes on 2 cores unless this machine has built it before",
        [*install, "--editable", ".", "--group", "dev"],
        log,
    )
    if chosen["HVDTRAIN_MPI"] == "site":
        # mpi4py's wheel searches for an MPI by library name and may find another one than Horovod's, or none.
        if "MPI_HOME" in os.environ:
            os.environ["MPICC"] = str(Path(os.environ["MPI_HOME"], "bin", "mpicc"))
        requirement = re.findall(r'"(mpi4py[^"]*)"', (ROOT / "pyproject.toml").read_text())
        options = ["--no-deps", "--no-cache", "--no-binary", "mpi4py", "--reinstall-package", "mpi4py"]
        run_step("Building mpi4py with the site's MPI", [*install, *options, *requirement], log)
    (venv / STAMP).write_text(json.dumps(chosen))
    say("the environment is ready.")


def ensure_environment() -> Path:
    """The environment to run commands in; creates it if it is missing or out of date."""
    venv = wanted_environment()
    if claim(venv) and CURRENT.resolve() == venv:
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
        # A retry after a failure needs them.
        SETTINGS_FILE.write_text(json.dumps(settings()))
        if not claim(venv):
            with (ROOT / ".venv.log").open("w") as log:
                make_environment(venv, log)
            claim(venv)
        make_current(venv)
    return venv


def environment(venv: Path) -> dict[str, str]:
    env = dict(os.environ)
    env["VIRTUAL_ENV"] = str(venv)
    # launch/bin first: its horovodrun starts 10 times faster.
    folders = [str(ROOT / "launch" / "bin"), str(venv / "bin"), env.get("PATH", os.defpath)]
    env["PATH"] = os.pathsep.join(folders)
    env.pop("PYTHONHOME", None)
    # OMPI_MCA_odls_base_sigkill_timeout, the time to save after mpirun receives SIGTERM, is deliberately not set:
    # Open MPI waits for it twice, before SIGTERM and before SIGKILL, whenever a job fails or is stopped, even if all
    # ranks have already exited. With 10, ending a job took 20 s (with 1, the default: 2 s).
    return env


def main(arguments: list[str]) -> None:
    try:
        options, command = take_options(arguments)
    except OptionError as error:
        fail(*error.args)
    if not command:
        fail(
            "a command is missing.",
            "For example: launch/run horovodrun -np 2 python -m hvdtrain · launch/run pytest",
        )
    # The default action of SIGTERM would leave the installer running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    venv = ensure_environment()
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
