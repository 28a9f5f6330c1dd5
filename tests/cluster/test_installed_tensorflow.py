"""An environment on top of a virtual environment that has TensorFlow: nothing of it is installed again."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf
from launcher import ROOT

pytestmark = pytest.mark.long


def run(*command: str | Path, **options) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=600, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_trains_on_top_of_a_tensorflow_that_is_there(tmp_path):
    uv = shutil.which("uv") or next((ROOT / ".venv.uv").glob("bin/uv"))
    site = tmp_path / "site"
    base = getattr(sys, "_base_executable", sys.executable)
    run(uv, "venv", "--python", base, site)
    run(uv, "pip", "install", "--python", site / "bin" / "python", f"tensorflow=={tf.__version__}")
    checkout = tmp_path / "checkout"
    run("git", "clone", "--quiet", "--no-hardlinks", ROOT, checkout)
    names = ("OMPI_", "VIRTUAL_ENV", "PYTHON", "HVDTRAIN_", "UV_CONSTRAINT")
    env = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    env |= {"HVDTRAIN_TENSORFLOW": "installed", "HVDTRAIN_PYTHON": str(site / "bin" / "python")}
    train = ["python", "-m", "hvdtrain", "--steps", "20", "--run-dir", tmp_path / "run"]
    run("launch/run", "horovodrun", "-np", "2", *train, cwd=checkout, env=env)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["ranks"] == 2
    (packages,) = (checkout / ".venv" / "lib").glob("python3.*/site-packages")
    assert (packages / "horovod").exists()
    assert not (packages / "tensorflow").exists()
    assert not (packages / "keras").exists()
    # It refuses another TensorFlow than Horovod was compiled for.
    (packages / "tensorflow_version.pth").write_text("import tensorflow; tensorflow.__version__ = '2.17.0'\n")
    done = subprocess.run(
        ["launch/run", "python", "-m", "hvdtrain"], cwd=checkout, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 64, done.stderr
    assert "hvdtrain-horovod must be built for the TensorFlow that is installed." in done.stderr
    assert "delete .venvs" in done.stderr
    shutil.rmtree(tmp_path)
