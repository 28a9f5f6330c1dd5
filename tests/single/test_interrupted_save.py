"""A save that is killed at any point leaves the previous checkpoint or the new one, never a mixture."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "outcomes"),
    [
        (2, {"[1.0]", "[1.0, 2.0]", "[2.0]"}),
        pytest.param(1, {"[1.0]", "[2.0]"}, marks=pytest.mark.long),
    ],
)
def test_a_save_killed_before_each_of_its_file_calls(step, outcomes, tmp_path):
    """The save of another step, and one that replaces the checkpoint of the same step."""
    if os.uname().machine != "x86_64":
        pytest.skip("system calls are traced on x86-64 only")
    script = Path(__file__).with_name("interrupted_saves.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), str(step)], capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    print(f"{result['points']} points: {result['outcomes']}")
    assert {"write", "openat", "fsync", "rename", "mkdir", "unlinkat"} <= set(result["calls"])
    assert result["points"] >= 40
    assert set(result["outcomes"]) == outcomes
