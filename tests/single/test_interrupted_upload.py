"""An upload that is killed at any point leaves the previous checkpoint or the new one in the store, never a mixture."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["file", "s3"])
def test_an_upload_killed_at_each_of_its_operations(protocol, request, two_checkpoints, tmp_path):
    checkpoints, _ = two_checkpoints
    url = request.getfixturevalue("s3_url") if protocol == "s3" else f"file://{tmp_path}/store"
    command = [sys.executable, str(Path(__file__).with_name("interrupted_uploads.py")), str(checkpoints), url]
    done = subprocess.run([*command, str(tmp_path / "local")], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["operations"] == ["upload"] * 5 + ["delete"] * 5
    assert set(result["outcomes"]) == {"1", "2"}
    assert sum(result["outcomes"].values()) == (4 if protocol == "s3" else 22), result
