"""Environments built in a copy of the checkout: with a site MPI, and for GPUs with NCCL."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from laboratory import Laboratory, missing
from launcher import ROOT

pytestmark = pytest.mark.long
NAMES = {"mpich": "MPICH", "openmpi": "Open MPI"}
# Lab hosts share the cores of this machine: use as many threads per rank as two local ranks get.
TRAIN = ["python", "-m", "hvdtrain", "--deterministic", "--steps", "20", "--threads", "1"]


@pytest.fixture
def checkout(tmp_path) -> Path:
    ignored = shutil.ignore_patterns(".venv*", ".git", "runs", "__pycache__", ".*_cache")
    return Path(shutil.copytree(ROOT, tmp_path / "hvdtrain", ignore=ignored))


def environment(*folders: Path, **more: str) -> dict[str, str]:
    """The variables of a shell outside this checkout's environment, with folders at the front of PATH."""
    own = str(ROOT / ".venv")
    path = [*map(str, folders), *(each for each in os.environ["PATH"].split(":") if not each.startswith(own))]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "VIRTUAL_ENV", "PYTHON"))}
    return {**env, "PATH": ":".join(path), **more}


@pytest.fixture(params=NAMES)
def site(request, tmp_path) -> tuple[str, dict[str, str]]:
    """An MPI's name, and the variables of a shell that has loaded it."""
    programs = {name: shutil.which(f"{name}.{request.param}") for name in ("mpicc", "mpicxx", "mpirun")}
    if None in programs.values():
        pytest.skip(f"needs Debian's {request.param} and its headers. Found: {programs}")
    (tmp_path / "bin").mkdir()
    for name, path in programs.items():
        # Not a symlink: MPICH's mpirun looks for its other programs in its own folder.
        (tmp_path / "bin" / name).write_text(f'#!/bin/sh\nexec {path} "$@"\n')
        (tmp_path / "bin" / name).chmod(0o755)
    return request.param, environment(tmp_path / "bin", HVDTRAIN_MPI="site")


def run(command: list[str], env: dict[str, str], timeout_s: float = 120) -> str:
    done = subprocess.run(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def digest(run_dir: Path) -> str:
    return json.loads((run_dir / "summary.json").read_text())["weights_sha256"]


@pytest.fixture(scope="module")
def usual(tmp_path_factory) -> str:
    """The weights' digest of two ranks in this environment. Any other gives the same: two numbers add up in one way."""
    run_dir = tmp_path_factory.mktemp("usual") / "run"
    run([str(ROOT / "launch" / "mpirun.sh"), "-np", "2", *TRAIN, "--run-dir", str(run_dir)], environment())
    return digest(run_dir)


def test_site_mpi(site, checkout, usual, tmp_path):
    name, env = site
    here, mpirun = str(checkout / "launch" / "run"), str(checkout / "launch" / "mpirun.sh")
    version = "from mpi4py import MPI; print(MPI.Get_library_version())"
    assert NAMES[name].replace(" MPI", " MPI v") in run([here, "python", "-c", version], env, timeout_s=900)
    run_dir = tmp_path / "run"
    output = run([mpirun, "-np", "2", *TRAIN, "--run-dir", str(run_dir)], env)
    assert f"by {NAMES[name]} 4" in output
    assert "ranks: 2 on 1 host(s)" in output, output
    assert digest(run_dir) == usual
    if missing():
        return
    with Laboratory(2) as lab:
        command = [mpirun, "-H", lab.slots(), *TRAIN, "--run-dir", "/mnt/run"]
        output = run(lab.command("lab1", ["env", *(f"{key}={value}" for key, value in env.items()), *command]), env)
        assert "ranks: 2 on 2 host(s)" in output, output
        assert digest(lab.path("lab1", "/mnt/run")) == usual


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="compiling for GPUs needs a CUDA toolkit: no nvcc on PATH")
def test_nccl(checkout, usual, tmp_path):
    """NCCL is compiled in, linked and loaded; without a GPU, ranks average on CPUs."""
    env = environment(HOROVOD_GPU_OPERATIONS="NCCL")
    here = str(checkout / "launch" / "run")
    built = "import horovod.tensorflow as hvd; print(hvd.nccl_built() > 20000 and hvd.cuda_built())"
    assert run([here, "python", "-c", built], env, timeout_s=900).endswith("True\n")
    run_dir = tmp_path / "run"
    run([here, "horovodrun", "-np", "2", *TRAIN, "--run-dir", str(run_dir)], env)
    assert digest(run_dir) == usual
