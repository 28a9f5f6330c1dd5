"""Runs of elastic_task.py: the commands, and the comparison with one process."""

import io
import json
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np
import pytest
from launcher import ROOT, TESTS

TRAIN = [sys.executable, "-m", "hvdtrain", "--task", str(TESTS / "elastic_task.py")]
GLOBAL_BATCH = 48


def train_alone(
    run_dir: Path, steps: int, batch_size: int = GLOBAL_BATCH, timeout_s: float = 120, options: Sequence[str] = ()
) -> Path:
    """Trains, or completes a run, on one process; returns the run directory."""
    line = [*TRAIN, *options, "--batch-size", str(batch_size), "--steps", str(steps), "--run-dir", str(run_dir)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stderr
    return run_dir


def weights(run_dir: Path) -> dict[str, np.ndarray]:
    """The final weights. Keras could read them only with the task's layers."""
    found = {}

    def keep(name: str, node: object) -> None:
        if isinstance(node, h5py.Dataset):
            found[name] = node[()]

    with zipfile.ZipFile(run_dir / "model.keras") as archive:
        content = io.BytesIO(archive.read("model.weights.h5"))
    with h5py.File(content, "r") as file:
        file["layers"].visititems(keep)
    assert len(found) >= 4
    return found


def summary(run_dir: Path) -> dict:
    return json.loads((run_dir / "summary.json").read_text())


def assert_equal_runs(ours: Path, theirs: Path) -> None:
    """Requires the same final weights to 1e-10, and the same samples."""
    expected = weights(theirs)
    found = weights(ours)
    assert found.keys() == expected.keys()
    difference = max(np.abs(found[name] - b).max() / max(1e-12, np.abs(b).max()) for name, b in expected.items())
    assert difference < 1e-10
    for name in ("steps", "samples"):
        assert summary(ours)[name] == summary(theirs)[name]
    assert summary(ours)["eval"] == pytest.approx(summary(theirs)["eval"], rel=1e-6)
