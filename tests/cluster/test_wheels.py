"""What launch/wheelhouse collects, installed by nothing but pip, without a network and without a compiler."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launcher import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.waits]

# Runs in a network namespace of its own, which has no route anywhere.
INSTALL_AND_TRAIN = """
set -e
ip link set lo up
[ -z "$(ip route)" ]
"$PYTHON" -m venv installed
PATH=$PWD/installed/bin:$PWD/programs
if command -v c++ || command -v g++ || command -v uv; then exit 3; fi
pip install --quiet --no-index --find-links "$WHEELS" hvdtrain
pip check
hvdtrain --version
horovodrun -np 2 python -m hvdtrain --steps 20 --deterministic --run-dir mpi
horovodrun --gloo -np 2 python -m hvdtrain --steps 20 --deterministic --run-dir gloo
"""


def digest(run_dir: Path) -> str:
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["ranks"] == 2
    return summary["weights_sha256"]


def test_wheels_train_without_network_or_compiler(tmp_path):
    tools = {name: shutil.which(name) for name in ("unshare", "ip", "sh", "bash", "env", "uname")}
    if None in tools.values() or os.geteuid() != 0:
        pytest.skip(f"needs root, util-linux and iproute2. Found: {tools}")
    # Neither compilers nor ssh.
    (tmp_path / "programs").mkdir()
    for name in ("sh", "bash", "env", "uname"):
        (tmp_path / "programs" / name).symlink_to(tools[name])
    wheels = tmp_path / "wheels"
    command = [str(ROOT / "launch" / "wheelhouse"), str(wheels)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert made.returncode == 0, made.stdout + made.stderr
    (horovod,) = wheels.glob("hvdtrain_horovod-*.whl")
    assert "-py3-none-manylinux_2_" in horovod.name
    assert len(list(wheels.glob("hvdtrain*.tar.gz"))) == 2
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "VIRTUAL_ENV", "PYTHON"))}
    python = Path(getattr(sys, "_base_executable", sys.executable))
    done = subprocess.run(
        [tools["unshare"], "--net", "sh", "-c", INSTALL_AND_TRAIN],
        env={**env, "PYTHON": str(python), "WHEELS": str(wheels), "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "No broken requirements" in done.stdout
    assert digest(tmp_path / "mpi") == digest(tmp_path / "gloo")
    # pytest keeps the folders of its last runs: 4 GB each.
    shutil.rmtree(tmp_path)
