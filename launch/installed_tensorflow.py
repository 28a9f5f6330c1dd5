"""An environment on top of a Python that has TensorFlow: that of a module, a container or a virtual environment.

Nothing that this Python has is downloaded or replaced; Horovod is compiled for its TensorFlow. Uses only the standard
library of Python 3.10 or later.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TextIO

from installation import (
    ROOT,
    check_compiler,
    check_disk_space,
    chosen_extras,
    extras,
    fail,
    find_uv,
    mpi4py_from_source,
    mpi_to_install,
    run_step,
    uv_pip_install,
    wheelhouse,
)

# Prints where a Python finds packages, and its TensorFlow.
_DESCRIBE = """
import json, os, sys, tensorflow
folders = [each for each in sys.path if os.path.basename(each) in ("site-packages", "dist-packages")]
print(json.dumps([folders, tensorflow.__version__]))
"""
_NOT_INSTALLED_BY_PIP = ("tensorflow", "hvdtrain-horovod")


def make_environment_on_top(venv: Path, log: TextIO) -> None:
    """Creates an environment with hvdtrain, for the settings in ``os.environ``."""
    python = os.environ.get("HVDTRAIN_PYTHON") or shutil.which("python3") or sys.executable
    folders, version = _described(python)
    check_compiler()
    check_disk_space()
    uv = find_uv(log)
    run_step(
        f"Creating the environment in {venv.relative_to(ROOT)}, on top of TensorFlow {version}",
        [*uv, "venv", "--quiet", "--clear", "--python", python, str(venv)],
        log,
    )
    (packages,) = (venv / "lib").glob("python3.*/site-packages")
    # Not --system-site-packages: the Python may be that of a virtual environment itself.
    (packages / "hvdtrain-on-top.pth").write_text("".join(f"{each}\n" for each in folders))
    run_step("Installing pip", [*uv_pip_install(uv, venv), "pip>=25.1"], log)
    pip = _pip_install(venv)
    backend = _backend()
    if os.environ.get("HVDTRAIN_MPI") == "site":
        run_step("Building mpi4py with the site's MPI, unless it is there", [*pip, *mpi4py_from_source()], log)
    needed = [*_requirements(chosen_extras()), *backend.libraries(), *backend.TOOLS, "hatchling", "editables"]
    run_step("Installing what hvdtrain needs beside TensorFlow, and what builds Horovod", [*pip, *needed], log)
    build = [*pip, "--no-deps", "--no-build-isolation", "--no-cache-dir"]
    os.environ.update({f"PIP_{name}": value for name, value in _offline().items()})
    run_step(
        f"Building Horovod for TensorFlow {version}, about 2 minutes on 2 cores", [*build, "./launch/horovod"], log
    )
    run_step("Installing hvdtrain", [*build, "--editable", "."], log)
    if to_install := mpi_to_install():
        run_step("Installing MPI", [*pip, *to_install], log)


def add_development_tools_on_top(venv: Path, log: TextIO) -> None:
    """Adds the group dev of pyproject.toml and the extras."""
    others = [each for each in extras() if each != "cuda"]  # gigabytes
    needed = ["--group", "pyproject.toml:dev", *_requirements(others)]
    run_step("Adding what tests and linters need", [*_pip_install(venv), *needed], log)


def _pip_install(venv: Path) -> list[str]:
    """Unlike uv, pip leaves out what can be imported already."""
    options = ["--disable-pip-version-check", "--root-user-action", "ignore"]
    return [str(venv / "bin" / "python"), "-m", "pip", "install", *options, *wheelhouse()]


def _described(python: str) -> tuple[list[str], str]:
    done = subprocess.run([python, "-c", _DESCRIBE], capture_output=True, text=True)
    if done.returncode != 0:
        fail(
            f"HVDTRAIN_TENSORFLOW=installed needs a Python that has TensorFlow. Received: {python}, which has "
            f"none ({done.stderr.strip().splitlines()[-1] if done.stderr.strip() else 'it does not start'}).",
            "Load the module, or name its Python: HVDTRAIN_PYTHON=/path/to/python3 launch/run …; or unset "
            "HVDTRAIN_TENSORFLOW to install TensorFlow.",
        )
    folders, version = json.loads(done.stdout.splitlines()[-1])
    return folders, version


def _backend():  # type: ignore[no-untyped-def]
    sys.path.append(str(ROOT / "launch" / "horovod"))
    import backend

    return backend


def _requirements(chosen: list[str]) -> list[str]:
    """The dependencies of hvdtrain and of extras, but TensorFlow and Horovod."""
    text = (ROOT / "pyproject.toml").read_text()
    lists = [re.search(r"^dependencies = \[\n(.*?)^\]", text, re.DOTALL | re.MULTILINE)]
    for extra in chosen:
        lists.append(re.search(rf"^{extra} = (\[.*\])", text, re.MULTILINE))
    named = [each for found in lists if found for each in re.findall(r'"([^"\n]+)"(?=[,\]]|$)', _uncommented(found[1]))]
    return [each for each in named if re.split(r"[^A-Za-z0-9_-]", each, maxsplit=1)[0] not in _NOT_INSTALLED_BY_PIP]


def _uncommented(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))


def _offline() -> dict[str, str]:
    """For the build of Horovod, which downloads Horovod's source by pip."""
    folder = os.environ.get("HVDTRAIN_WHEELHOUSE")
    return {"NO_INDEX": "1", "FIND_LINKS": folder} if folder else {}
