"""Batches that are copied to the computing device ahead of their steps: the same samples, steps and errors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_steps_are_those_without_prefetching():
    script = Path(__file__).with_name("prefetched_runs.py")
    # Importable there: trainers.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(each for each in sys.path if each)}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert "at most 1" in found.pop("too many")
    assert "prefetch_to_device=True copies dense tensors of numbers. Received: samples with" in found.pop("strings")
    assert found.pop("without a GPU") == "CPU:0"
    assert len(found) == 5
    for name, each in found.items():
        assert each == {"devices": ["CPU:1", "CPU:0"], "equal": True}, name
