"""Makes the environment of this checkout when it is missing or out of date, then runs a command in it.

Called by ``launch/run``; with ``--restarts``, ``restarts.py`` runs the command. Only the standard library,
any Python from 3.10 on. Settings, all from the environment: ``HVDTRAIN_PYTHON`` (the interpreter), and
those of ``launch/horovod/backend.py`` (``HVDTRAIN_MPI``, ``HOROVOD_GPU_OPERATIONS``). Another value makes
the environment anew; one that is not mentioned again stays in force until ``.venv`` is deleted.
"""

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
from typing import Any, NoReturn, TextIO

from restarts import OptionError, supervise, take_options

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "hvdtrain-environment.json"
LOCK = ROOT / ".venv.lock"
UV_HOME = ROOT / ".venv.uv"
INPUTS = ("pyproject.toml", "launch/horovod/pyproject.toml", "launch/horovod/backend.py", "launch/horovod/horovod.txt")
# Choices, not circumstances: MPI_HOME or CXX can differ between a login and a job, which must not rebuild
# the environment that other jobs run in.
SETTINGS = ("HVDTRAIN_MPI", "HOROVOD_GPU_OPERATIONS", "HVDTRAIN_PYTHON")
# Measured: 2.4 GB in the package cache; the environment shares them where it lies on the same disk.
NEEDED_DISK_GB = 5
PROGRESS_EVERY_S = 15
SHOWN_LINES_OF_FAILURE = 30


def say(message: str) -> None:
    print(f"launch/run: {message}", file=sys.stderr, flush=True)


def fail(rule: str, remedy: str) -> NoReturn:
    say(rule)
    say(remedy)
    raise SystemExit(1)


def made_from() -> str:
    """Changes with the files the environment is made from, and with its place (scripts name it)."""
    digest = hashlib.sha256(str(ROOT).encode())
    for name in INPUTS:
        text = (ROOT / name).read_text()
        digest.update((what_is_installed(text) if name == "pyproject.toml" else text).encode())
    return digest.hexdigest()


def what_is_installed(pyproject: str) -> str:
    """The sections that decide it: another rule for a linter must not build for minutes."""
    sections = re.split(r"^(?=\[)", pyproject, flags=re.MULTILINE)
    return "".join(each for each in sections if each.startswith(("[project", "[dependency-groups]", "[tool.uv")))


def read_stamp() -> dict[str, Any]:
    """What the environment was made from, and with which settings; empty where there is none."""
    try:
        return json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}


def settings(stamp: dict[str, Any]) -> dict[str, str]:
    """The settings asked for now; what is not mentioned stays as the environment was made."""
    made_with = stamp.get("settings", {})
    return {name: os.environ.get(name) or made_with.get(name, "") for name in SETTINGS}


def is_current() -> bool:
    stamp = read_stamp()
    wanted = {"made_from": made_from(), "settings": settings(stamp)}
    return stamp == wanted and (VENV / "bin" / "python").exists()


def check_compiler() -> None:
    compiler = os.environ.get("CXX", "")
    found = shutil.which(compiler) if compiler else next(filter(None, map(shutil.which, ("c++", "g++"))), None)
    missing = [name for name, there in (("a C++ compiler", found), ("make", shutil.which("make"))) if not there]
    if missing:
        fail(
            f"building Horovod needs {' and '.join(missing)}, not found"
            + (f" (CXX={compiler})." if compiler else " on PATH."),
            "Debian, Ubuntu: apt install g++ make · Fedora: dnf install gcc-c++ make · a cluster: module load gcc",
        )


def check_disk_space() -> None:
    cache = Path(os.environ.get("UV_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    for folder, remedy in (
        (ROOT, "free some, or clone to a larger disk."),
        (cache, "free some, or name a cache folder on a larger disk: UV_CACHE_DIR=/path launch/run …"),
    ):
        while not folder.exists():
            folder = folder.parent
        free_gb = shutil.disk_usage(folder).free / 1e9
        if free_gb < NEEDED_DISK_GB:
            fail(f"the environment needs {NEEDED_DISK_GB} GB of disk. Free in {folder}: {free_gb:.1f} GB.", remedy)


def run_step(what: str, command: list[str], log: TextIO) -> None:
    """Runs one step of the set-up. Its output goes to the log; here it says every few seconds how far it is."""
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
        sys.stderr.writelines(list(lines)[-SHOWN_LINES_OF_FAILURE:])
        explain("".join(lines).lower(), Path(log.name))


def show_progress(what: str, lines: deque[str], ended: threading.Event) -> None:
    """A build of minutes must not look like a hang."""
    began_s = time.monotonic()
    while not ended.wait(PROGRESS_EVERY_S):
        last = lines[-1].strip() if lines else ""
        say(f"still {what[0].lower()}{what[1:]}: {time.monotonic() - began_s:.0f} s{'; ' if last else ''}{last[:80]}")


def explain(output: str, log: Path) -> NoReturn:
    """Ends the set-up with the reason that its output shows."""
    network = (
        *("dns error", "failed to fetch", "error sending request", "failed to establish a new connection"),
        *("connection refused", "temporary failure in name resolution", "read timed out", "connect timeout"),
    )
    if "no space left" in output:
        fail("the disk is full.", f"Free at least {NEEDED_DISK_GB} GB and call launch/run again.")
    if any(sign in output for sign in network):
        fail(
            "the package index could not be reached.",
            "Check the network or proxy (HTTPS_PROXY), or name your site's mirror: UV_INDEX_URL=… PIP_INDEX_URL=…",
        )
    fail(f"the set-up failed; all that was printed is in {log}.", "Mend what it names and call launch/run again.")


def find_uv(log: TextIO) -> list[str]:
    """The machine's uv, or one installed from PyPI into the checkout."""
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


def make_environment(log: TextIO) -> None:
    check_compiler()
    check_disk_space()
    uv = find_uv(log)
    chosen = settings(read_stamp())
    os.environ.update({name: value for name, value in chosen.items() if value})
    base = getattr(sys, "_base_executable", sys.executable)
    STAMP.unlink(missing_ok=True)
    run_step("Making the environment in .venv", [*uv, "venv", "--quiet", "--clear", "--python", base, str(VENV)], log)
    # Not finished, but a second try after a failure has to know the settings.
    STAMP.write_text(json.dumps({"made_from": "", "settings": chosen}))
    # Compiled here, in 15 s: where PYTHONDONTWRITEBYTECODE is set, as in many containers, or where ranks may not write
    # here, each start of each rank would otherwise compile TensorFlow anew, for 5 s.
    install = [*uv, "pip", "install", "--compile-bytecode", "--python", str(VENV / "bin" / "python")]
    if chosen["HVDTRAIN_MPI"] == "site":
        # The cache knows that it was a site's MPI, not which one.
        install += ["--refresh-package", "horovod"]
    run_step(
        "Installing TensorFlow and building Horovod for it, about 2 minutes on 2 cores",
        [*install, "--editable", ".", "--group", "dev"],
        log,
    )
    if chosen["HVDTRAIN_MPI"] == "site":
        # The wheel of mpi4py looks for an MPI by the names of libraries, and finds another than Horovod's, or none.
        if "MPI_HOME" in os.environ:
            os.environ["MPICC"] = str(Path(os.environ["MPI_HOME"], "bin", "mpicc"))
        requirement = re.findall(r'"(mpi4py[^"]*)"', (ROOT / "pyproject.toml").read_text())
        options = ["--no-deps", "--no-cache", "--no-binary", "mpi4py", "--reinstall-package", "mpi4py"]
        run_step("Building mpi4py with the site's MPI", [*install, *options, *requirement], log)
    STAMP.write_text(json.dumps({"made_from": made_from(), "settings": chosen}))
    say("the environment is ready.")


def ensure_environment() -> None:
    if is_current():
        return
    try:
        lock = LOCK.open("w")
    except OSError as error:
        fail(f"{ROOT} must be writable on first use: {error}.", "Clone to a folder of your own.")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another launch/run is making the environment; waiting for it.")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_current():
            with (ROOT / ".venv.log").open("w") as log:
                make_environment(log)


def environment() -> dict[str, str]:
    env = dict(os.environ)
    env["VIRTUAL_ENV"] = str(VENV)
    # launch/bin before: its horovodrun starts in a tenth of the time.
    folders = [str(ROOT / "launch" / "bin"), str(VENV / "bin"), env.get("PATH", os.defpath)]
    env["PATH"] = os.pathsep.join(folders)
    env.pop("PYTHONHOME", None)
    # Without OMPI_MCA_odls_base_sigkill_timeout, which is the time to save after mpirun was sent SIGTERM: Open MPI
    # lets it pass twice, before SIGTERM and before SIGKILL, whenever a job fails or is stopped, even when all ranks
    # have long ended by themselves. With 10, the end of a job took 20 s (with 1, the default: 2 s).
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
    # A plain SIGTERM would leave the installer running behind us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    ensure_environment()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    env = environment()
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
